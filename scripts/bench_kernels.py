#!/usr/bin/env python3
"""Times paged_decode on the GPU that MLX has, beside reading the same bytes in a row and beside MLX's own attention.

    python scripts/bench_kernels.py                                every case: one JSON line each, then a table
    python scripts/bench_kernels.py --only 'B32 ' --skip-peers     some cases, ours alone

Every time is that of one call in a chain of --chain dependent calls in one graph (each takes the last one's output as
its queries), the best of --repeats. K and V are random; block tables are shuffled over the whole pool.
  us, GB/s     one call of paged_decode, its reduce included; K and V bytes that it must read, per second
  of copy      GB/s against those of a copy of as many bytes (read and written ones both counted)
  x sdpa       time against MLX's attention over contiguous K and V of the longest row, without a mask: above 1, slower
  x masked     the same with the mask that a dense batch of ragged rows needs
  x gather     against taking K and V from the pool by MLX, then that masked attention
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mlx.core as mx
import numpy as np

from mlxpaged.kernels.launch import Launcher, new_token, padded
from mlxpaged.kernels.paged_decode import paged_decode
from scripts.check_kernels import make_launcher

NUM_HEADS, NUM_KV_HEADS = 32, 8
DTYPE = mx.bfloat16
ENOUGH_SECONDS = 2.0
"""Of repeats, for one measurement."""


MOST_ELEMENTS = 1 << 31
"""Of one pool array."""


@dataclass(frozen=True)
class Load:
    """One case: `lengths` are the rows' contexts, `positions` their query positions. `spread`: the rows' blocks lie in
    a pool so many times as large as they need."""

    name: str
    width: int
    lengths: tuple[int, ...]
    block_size: int = 16
    window: int | None = None
    positions: int = 1
    spread: int = 1
    key_bytes: int = field(init=False)
    """Bytes of K that any kernel must read; V has as many."""

    def __post_init__(self) -> None:
        most = max(self.lengths) if self.window is None else self.window + self.positions - 1
        seen = [min(length, most) for length in self.lengths]
        object.__setattr__(self, "key_bytes", sum(seen) * NUM_KV_HEADS * self.width * DTYPE.size)


def loads() -> Iterator[Load]:
    for width in (64, 128):
        for rows in (1, 8, 32, 128):
            for context in (512, 1024, 4096, 32768):
                yield Load(f"w{width} B{rows} ctx {context}", width, (context,) * rows)
        yield Load(f"w{width} B1 ctx 524288", width, (524288,))
        mixed = tuple(np.geomspace(64, 8192, 32).astype(int).tolist())
        yield Load(f"w{width} B32 ctx 64..8192 mixed", width, mixed)
        yield Load(f"w{width} B32 ctx 32768 window 1024", width, (32768,) * 32, window=1024)
        yield Load(f"w{width} B32 ctx 1024 spread as far", width, (1024,) * 32, spread=32)
        for block_size in (8, 32, 64):
            yield Load(f"w{width} B32 ctx 4096 block {block_size}", width, (4096,) * 32, block_size=block_size)
        yield Load(f"w{width} B1 ctx 30000 Q16", width, (30000,), positions=16)


class Bench:
    """Builds a load's arrays and times calls on them."""

    def __init__(self, launch: Launcher, arguments: argparse.Namespace) -> None:
        self._launch = launch
        self._chain = arguments.chain
        self._repeats = arguments.repeats
        self._partitions = arguments.partitions
        self._copies: dict[int, float] = {}

    def paged(self, load: Load, pools: tuple[mx.array, mx.array], tables: np.ndarray) -> float:
        device_tables, lengths = padded(tables), padded(np.array(load.lengths))

        def step(state: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
            queries, token = state
            return paged_decode(
                self._launch,
                queries,
                *pools,
                device_tables,
                lengths,
                token,
                max_context=max(load.lengths),
                scale=load.width**-0.5,
                window=load.window,
                partitions=self._partitions,
            )

        shape = (len(load.lengths), load.positions, NUM_HEADS, load.width)
        return self._seconds(step, (random(shape), new_token()), device_tables, lengths)

    def sdpa(self, load: Load, masked: bool) -> float:
        shape = (len(load.lengths), NUM_KV_HEADS, max(load.lengths), load.width)
        keys, values, mask = random(shape), random(shape), ragged_mask(load) if masked else None

        def step(queries: mx.array) -> mx.array:
            return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=load.width**-0.5, mask=mask)

        queries = random((len(load.lengths), NUM_HEADS, load.positions, load.width))
        return self._seconds(step, queries, keys, values, *[mask] * masked)

    def gather(self, load: Load, pools: tuple[mx.array, mx.array], tables: np.ndarray) -> float:
        blocks = mx.array(tables[:, : -(-max(load.lengths) // load.block_size)])
        mask, longest = ragged_mask(load), max(load.lengths)

        def take(pool: mx.array) -> mx.array:
            run = pool[blocks].reshape(len(load.lengths), -1, NUM_KV_HEADS, load.width)
            return run[:, :longest].transpose(0, 2, 1, 3)

        def step(queries: mx.array) -> mx.array:
            keys, values = map(take, pools)
            return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=load.width**-0.5, mask=mask)

        queries = random((len(load.lengths), NUM_HEADS, load.positions, load.width))
        return self._seconds(step, queries, blocks, mask)

    def copy_rate(self, num_bytes: int) -> float:
        """Bytes read and written per second by a copy that moves about `num_bytes`, 64 MiB at least, 4 GiB at most."""
        size = 1 << min(max(num_bytes, 1 << 26), 1 << 32).bit_length() - 1
        if size not in self._copies:
            source = mx.zeros((size // 8,), mx.uint32)
            self._copies[size] = size / self._seconds(lambda array: array + 1, source)
        return self._copies[size]

    def _seconds(self, step: Callable, state: object, *arrays: mx.array) -> float:
        """Seconds of one `step`, which takes its own result; a first chain compiles and warms up."""
        mx.eval(state, *arrays)
        self._chain_seconds(step, state)
        best, spent = float("inf"), 0.0
        for _ in range(self._repeats):
            seconds = self._chain_seconds(step, state)
            best, spent = min(best, seconds), spent + seconds
            if spent > ENOUGH_SECONDS:
                break
        return best / self._chain

    def _chain_seconds(self, step: Callable, state: object) -> float:
        for _ in range(self._chain):
            state = step(state)
        mx.synchronize()
        started = time.perf_counter()
        mx.eval(state)
        mx.synchronize()
        return time.perf_counter() - started


def random(shape: tuple[int, ...]) -> mx.array:
    return mx.random.normal(shape, dtype=DTYPE)


def ragged_mask(load: Load) -> mx.array:
    """Which of the longest row's positions each row's queries see: bool [rows, 1, positions, context]."""
    at = np.arange(max(load.lengths))
    last = np.array(load.lengths)[:, None] - load.positions + np.arange(load.positions)
    seen = at <= last[..., None]
    if load.window is not None:
        seen &= at > last[..., None] - load.window
    return mx.array(seen[:, None])


def block_pools(load: Load) -> tuple[tuple[mx.array, mx.array], np.ndarray]:
    """Random pools that hold just the load's rows, and their shuffled tables [rows, width]."""
    counts = [-(-length // load.block_size) for length in load.lengths]
    most = MOST_ELEMENTS // (load.block_size * NUM_KV_HEADS * load.width)
    num_blocks = min(1 + sum(counts) * load.spread, most)
    # Rows that would need more share blocks, far apart in time: MLX's own operations end at so many elements.
    order = np.random.default_rng(0).permutation(num_blocks - 1) + 1
    blocks = np.resize(order, sum(counts))
    tables = np.zeros((len(counts), max(counts)), np.int32)
    for table, row_blocks in zip(tables, np.split(blocks, np.cumsum(counts)[:-1]), strict=True):
        table[: len(row_blocks)] = row_blocks
    shape = (num_blocks, load.block_size, NUM_KV_HEADS, load.width)
    pools = random(shape), random(shape)
    mx.eval(pools)
    return pools, tables


def measure(load: Load, bench: Bench, arguments: argparse.Namespace) -> dict[str, object]:
    pools, tables = block_pools(load)
    ours = bench.paged(load, pools, tables)
    rate = 2 * load.key_bytes / ours
    result: dict[str, object] = {
        "case": load.name,
        "us": round(ours * 1e6, 1),
        "GB/s": round(rate / 1e9),
        "of copy": round(rate / bench.copy_rate(2 * load.key_bytes), 2),
    }
    if not arguments.skip_peers and sum(pool.nbytes for pool in pools) <= arguments.peer_bytes:
        result["x sdpa"] = round(ours / bench.sdpa(load, masked=False), 2)
        result["x masked"] = round(ours / bench.sdpa(load, masked=True), 2)
        result["x gather"] = round(ours / bench.gather(load, pools, tables), 2)
    return result


def print_table(results: list[dict[str, object]]) -> None:
    columns = ("us", "GB/s", "of copy", "x sdpa", "x masked", "x gather")
    print(f"\n{'case':<28}" + "".join(f"{column:>10}" for column in columns))
    for result in results:
        print(f"{result['case']:<28}" + "".join(f"{result.get(column, '-'):>10}" for column in columns))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name holds this")
    parser.add_argument("--launcher", metavar="MODULE:CLASS", help="another launcher (default: the GPU's)")
    parser.add_argument("--chain", type=int, default=32, metavar="N", help="calls in one graph (default: 32)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="chains timed after a first (default: 3)")
    parser.add_argument("--partitions", type=int, metavar="N", help="of each row (default: as the engine divides it)")
    parser.add_argument("--skip-peers", action="store_true", help="time paged_decode and the copy alone")
    parser.add_argument("--peer-bytes", type=int, default=4 << 30, metavar="BYTES", help="no peers above these K and V")
    arguments = parser.parse_args()
    bench = Bench(make_launcher(arguments.launcher), arguments)
    print(f"mlx {mx.__version__}, {mx.device_info(mx.default_device())}", flush=True)
    results = []
    for load in loads():
        if arguments.only in load.name:
            results.append(measure(load, bench, arguments))
            print(json.dumps(results[-1]), flush=True)
            mx.clear_cache()
    print_table(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
