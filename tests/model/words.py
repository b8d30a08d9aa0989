"""A tokenizer of single bytes, made without files: id b is byte b, then two special tokens."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from mlxpaged.model.tokenizer import Tokenizer

END = 256
START = 257


def byte_tokenizer(**fields: object) -> Tokenizer:
    """Every text is its UTF-8 bytes; <end> ends a reply."""
    letters = _letters()
    raw = RawTokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<start>", special=True)])
    return Tokenizer(raw, frozenset({END}), **fields)  # type: ignore[arg-type]


def _letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each byte (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = [""] * 256, 0
    for byte in range(256):
        if byte in kept:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(256 + extra)
            extra += 1
    return table
