#!/usr/bin/env python3
"""Times skinny_matmul on the GPU that MLX has, split in each of its ways, beside MLX's own product.

    python scripts/bench_products.py                               the products of Llama's 1b and 8b shapes, 16 bits
    python scripts/bench_products.py --bits 4 --rows 8,32          packed ones
    python scripts/bench_products.py --shapes 4096x28672 --splits 1x4,2x2,4x1

Microseconds of one product in a compiled chain in which each takes something of the last one's result, as a decode
step's do; the best of --repeats, a small sum included, and what MLX's host needs to start both: on an H200 that is more
than a weight as small as 4096 x 4096 keeps the device. TB/s: bytes of the weight. One JSON line each, then a table.
scripts/profile_step.py shows the device's time alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mlx.core as mx

from mlxpaged.kernels.launch import Launcher
from mlxpaged.kernels.products import Compile, Product, ProductKind, Weight, by_mlx, by_skinny, product_chain
from mlxpaged.kernels.skinny_matmul import DENSE, PACKED, Split
from mlxpaged.kernels.timing import best_of
from scripts.bench_flags import at_least
from scripts.check_kernels import make_launcher

DTYPE = mx.bfloat16
GROUP_SIZE = 64
SHAPES = "2048x3072,2048x2048,2048x16384,8192x2048,4096x6144,4096x4096,4096x28672,14336x4096,4096x128256"
"""Projections of one input joined: q with k and v, gate with up."""


def main() -> int:
    arguments = parse_arguments()
    launch = make_launcher(arguments.launcher)
    lines = []
    for width, outputs in arguments.shapes:
        weights = make_weights(width, outputs, arguments)
        kind = ProductKind("bfloat16", 0 if arguments.bits == 16 else arguments.bits, GROUP_SIZE)
        for rows in arguments.rows:
            found = {"width": width, "outputs": outputs, "bits": arguments.bits, "rows": rows}
            found |= figures(launch, Product(kind, outputs, width), rows, weights, arguments)
            print(json.dumps(found), flush=True)
            lines.append(found)
        del weights
        mx.clear_cache()
    print(table(lines))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=_shapes, default=_shapes(SHAPES), metavar="KxN,...")
    parser.add_argument("--rows", type=_numbers, default=(8, 16, 32), metavar="M,...", help="default: 8,16,32")
    parser.add_argument("--splits", type=_splits, metavar="TxS,...", help="tiles x spans (default: those in use)")
    parser.add_argument("--bits", type=int, choices=(16, 8, 4), default=16, help="of a weight (default: 16)")
    parser.add_argument("--megabytes", type=at_least(1), default=1024, metavar="N", help="weights of a chain at least")
    parser.add_argument("--repeats", type=at_least(1), default=4, metavar="N", help="default: 4")
    parser.add_argument("--launcher", metavar="MODULE:CLASS", help="another launcher (default: the GPU's)")
    return parser.parse_args()


def _shapes(text: str) -> list[tuple[int, int]]:
    pairs = [tuple(at_least(1)(number) for number in pair.split("x")) for pair in text.split(",")]
    if not all(len(pair) == 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} are no pairs; give some such as 4096x6144,4096x4096")
    return [(first, second) for first, second in pairs]


def _splits(text: str) -> tuple[Split, ...]:
    return tuple(Split(*pair) for pair in _shapes(text))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(at_least(1)(part) for part in text.split(","))


def make_weights(width: int, outputs: int, arguments: argparse.Namespace) -> list[Weight]:
    """As many as are larger than any cache together."""
    count = max(2, min(48, (arguments.megabytes << 20) * 8 // (width * outputs * arguments.bits)))
    weights: list[Weight] = []
    for _ in range(count):
        dense = (mx.random.normal((outputs, width)) * 0.02).astype(DTYPE)
        packed = [dense] if arguments.bits == 16 else mx.quantize(dense, group_size=GROUP_SIZE, bits=arguments.bits)
        mx.eval(packed)
        weights.append(packed)
    return weights


def figures(
    launch: Launcher, product: Product, rows: int, weights: Sequence[Weight], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Microseconds of each way, and what the best of ours reads."""
    kind = product.kind
    splits = arguments.splits or (PACKED if kind.bits else DENSE)
    ours = {f"{split.tiles} tiles x {split.spans}": by_skinny(launch, kind, split) for split in splits}
    ways = {"mlx": by_mlx(kind)} | ours
    compiled: Compile = (lambda run: run) if arguments.launcher else mx.compile  # the emulator computes at once
    chains = [product_chain(way, product, rows, weights, compiled) for way in ways.values()]
    seconds = best_of(chains, len(weights), repeats=arguments.repeats)
    num_bytes = sum(array.nbytes for array in weights[0])
    us = {name: round(one * 1e6, 1) for name, one in zip(ways, seconds, strict=True)}
    return {"us": us, "tb_s": round(num_bytes / min(seconds[1:]) / 1e12, 2)}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """For a person: one line each, the least time marked."""
    names = list(lines[0]["us"])
    head = f"{'K x N':>14} {'rows':>5} {'TB/s':>6}  " + "  ".join(f"{name:>16}" for name in names)
    shown = [head]
    for line in lines:
        least = min(line["us"].values())
        times = "  ".join(f"{f'{us:.1f}' + ('*' if us == least else ' '):>16}" for us in line["us"].values())
        shown.append(f"{line['width']:>6} x {line['outputs']:<5} {line['rows']:>5} {line['tb_s']:>6.2f}  {times}")
    return "\n".join(["", *shown])


if __name__ == "__main__":
    sys.exit(main())
