"""Time what a grammar costs one reply: the first view of a vocabulary, one schema compiled, one mask and one step.

    scripts/bench_masks.py [MODEL]

Prints one line per figure, in milliseconds. Masks are computed on the engine's thread while a forward runs, so a
median far below a step's time costs nothing.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mlxpaged.chat.grammar import CompiledGrammar, Vocabulary, schema_notation
from mlxpaged.model.tokenizer import Tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "pages": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "author": {"$ref": "#/$defs/person"},
    },
    "required": ["title", "pages", "tags", "author"],
    "additionalProperties": False,
    "$defs": {"person": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}
TEXT = json.dumps(
    {"title": "A tale of two cities", "pages": 341, "tags": ["novel", "history"], "author": {"name": "Ch. Dickens"}}
)


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """(result, milliseconds)"""
    start = time.perf_counter()
    result = action()
    return result, (time.perf_counter() - start) * 1000


def mask_times(tokenizer: Tokenizer, compiled: CompiledGrammar) -> list[float]:
    """One mask before each token of TEXT."""
    grammar, words, times = compiled.fresh(), np.zeros(-(-tokenizer.vocab_size // 32), np.uint32), []
    for token_id in tokenizer.encode(TEXT):
        words[:] = 0
        times.append(timed(lambda: grammar.fill(words))[1])
        grammar.advance(token_id)
    return times


def main(model: str) -> None:
    from mlxpaged.model.loader import load
    from mlxpaged.model.sources import resolve

    tokenizer = load(resolve(model)).tokenizer
    vocabulary, view_ms = timed(lambda: Vocabulary(tokenizer, tokenizer.vocab_size))
    notation = "start: json\njson: " + schema_notation(SCHEMA, "schema")
    compiled, compile_ms = timed(lambda: vocabulary.compile(notation, "schema"))
    times = mask_times(tokenizer, compiled)
    print(f"{model}: {tokenizer.vocab_size} tokens")
    print(f"view of the vocabulary, once a model  {view_ms:8.2f} ms")
    print(f"schema compiled, once a request       {compile_ms:8.2f} ms")
    print(f"mask, median of {len(times):3} steps            {statistics.median(times):8.3f} ms")
    print(f"mask, slowest                         {max(times):8.3f} ms")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
