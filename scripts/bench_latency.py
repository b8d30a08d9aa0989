#!/usr/bin/env python3
"""Two latencies that a busy machine is judged by, measured on the engine itself.

    python scripts/bench_latency.py                               tiny model: 4 replies, a 4000-token prompt
    python scripts/bench_latency.py --model 1b --bits 16 --json   one JSON line; wants a GPU
    python scripts/bench_latency.py --model smollm2 --shared 500

stall: the gaps between the tokens of running replies, alone and while a long prompt is computed beside them; `chunk_ms`
is the slowest step that computed a part of it, and the promise is p95 <= 2 x alone + chunk. prefix: the time to the
first token of a prompt of --shared + 32 ids, unknown, and after another prompt with the same beginning; the promise is
80% less. Exits 1 when a promise is broken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_figures import percentile
from bench_flags import add_model_flags, at_least, report_of

if TYPE_CHECKING:
    from mlxpaged.engine.core import EngineCore

Figures = dict[str, Any]
OWN_IDS = 32
WARM_TOKENS = 8


def main() -> int:
    arguments = parse_arguments()
    report = report_of(bench, arguments)
    print(json.dumps(report, indent=None if arguments.json else 1))
    return 0 if report["stall"]["held"] and report["prefix"]["held"] else 1


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser, "tiny")
    parser.add_argument("--replies", type=at_least(1), default=4, metavar="N", help="that run beside the long prompt")
    parser.add_argument("--prompt", type=at_least(1), default=4000, metavar="N", help="tokens of the long prompt")
    parser.add_argument("--shared", type=at_least(1), default=500, metavar="N", help="tokens that two prompts share")
    parser.add_argument("--repeats", type=at_least(1), default=5, metavar="N", help="pairs of prompts (default: 5)")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    return parser.parse_args(given)


def bench(arguments: argparse.Namespace) -> Figures:
    """Both latencies on one engine; raises MlxpagedError."""
    from mlxpaged.model.upstream import import_mlx_lm

    import_mlx_lm("mlx_lm.generate")
    import bench_models as models
    from bench_batch import _backend

    from mlxpaged.config import EngineConfig
    from mlxpaged.engine.build import build

    bits = arguments.bits or (16 if models.on_gpu() else 32)
    loaded = models.load_model(arguments.model, bits, 0)
    core = build(loaded, EngineConfig(max_rows=arguments.replies + 1, context_len=arguments.prompt + 1024)).core
    ids = Ids(loaded.config["vocab_size"])
    for _ in range(2):  # once to warm up
        stall = stalled(core, ids, arguments.replies, arguments.prompt)
    return {
        "model": arguments.model,
        "bits": bits,
        "device": _backend(),
        "stall": {"replies": arguments.replies, "prompt": arguments.prompt, **stall},
        "prefix": {"shared": arguments.shared, **shared_prefix(core, ids, arguments.shared, arguments.repeats)},
    }


class Ids:
    """Random prompts, and the numbers of the requests that carry them."""

    def __init__(self, vocab_size: int) -> None:
        import numpy as np

        self._rng = np.random.default_rng(0)
        self._vocab_size = vocab_size
        self._numbers = itertools.count()

    def draw(self, count: int) -> list[int]:
        found: list[int] = self._rng.integers(0, self._vocab_size, count).tolist()
        return found

    def add(self, core: EngineCore, prompt: Sequence[int], max_tokens: int) -> int:
        """Queue a greedy request; its number."""
        import numpy as np

        from mlxpaged.sched.requests import Request, SamplingParams

        number = next(self._numbers)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        core.add(Request(number, np.asarray(prompt, np.int32), sampling))
        return number


class Arrivals:
    """When each request's tokens came, in seconds."""

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = {}

    def __call__(self, events: Sequence[Any]) -> None:
        from mlxpaged.sched.events import TokenEvent

        now = time.perf_counter()
        for event in events:
            if isinstance(event, TokenEvent):
                self.times.setdefault(event.request_id, []).append(now)

    def count(self, number: int) -> int:
        return len(self.times.get(number, ()))

    def gaps_ms(self, numbers: Sequence[int], begin: float, end: float) -> list[float]:
        """Gaps that ended between two moments."""
        return [
            (after - before) * 1000
            for number in numbers
            for before, after in itertools.pairwise(self.times[number])
            if begin < after <= end
        ]


def stalled(core: EngineCore, ids: Ids, replies: int, prompt_len: int) -> Figures:
    """`replies` rows decode alone for a while, then beside a prompt of `prompt_len` ids until its first token."""
    arrivals = Arrivals()
    running = [ids.add(core, ids.draw(OWN_IDS), 900) for _ in range(replies)]
    while any(arrivals.count(number) < WARM_TOKENS for number in running):
        core.step(arrivals)
    began = time.perf_counter()
    for _ in range(40):
        core.step(arrivals)
    alone_until = time.perf_counter()
    long, slowest = ids.add(core, ids.draw(prompt_len), 2), 0.0
    while arrivals.count(long) == 0:
        before = time.perf_counter()
        core.step(arrivals)
        slowest = max(slowest, time.perf_counter() - before)
    beside = arrivals.gaps_ms(running, alone_until, arrivals.times[long][0])
    for number in running:
        core.cancel(number)
    while not core.idle:
        core.step(arrivals)
    core.scheduler.blocks.forget()
    alone_p95, beside_p95 = (percentile(gaps, 0.95) for gaps in (arrivals.gaps_ms(running, began, alone_until), beside))
    return {
        "alone_p95_ms": round(alone_p95, 3),
        "beside_p95_ms": round(beside_p95, 3),
        "chunk_ms": round(slowest * 1000, 3),
        "tokens_beside": len(beside),
        "held": beside_p95 <= 2 * alone_p95 + slowest * 1000,
    }


def shared_prefix(core: EngineCore, ids: Ids, shared: int, repeats: int) -> Figures:
    """Time to the first token of a prompt that is new, and of one whose first `shared` ids are known."""
    cold, warm = [], []
    for _ in range(repeats + 1):
        beginning = ids.draw(shared)
        cold.append(first_token_ms(core, ids, beginning + ids.draw(OWN_IDS)))
        cached = core.scheduler.cached_tokens
        warm.append(first_token_ms(core, ids, beginning + ids.draw(OWN_IDS)))
        cached = core.scheduler.cached_tokens - cached
    less = 1 - statistics.median(warm[1:]) / statistics.median(cold[1:])
    return {
        "cold_ttft_ms": round(statistics.median(cold[1:]), 3),
        "warm_ttft_ms": round(statistics.median(warm[1:]), 3),
        "found": cached,
        "less": round(less, 4),
        "held": less >= 0.8,
    }


def first_token_ms(core: EngineCore, ids: Ids, prompt: Sequence[int]) -> float:
    """How long a prompt on an idle engine waits for its first token."""
    arrivals, began = Arrivals(), time.perf_counter()
    number = ids.add(core, prompt, 2)
    while not core.idle:
        core.step(arrivals)
    return (arrivals.times[number][0] - began) * 1000


if __name__ == "__main__":
    sys.exit(main())
