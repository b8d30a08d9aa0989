#!/usr/bin/env python3
"""Runs the kernels' case grid on the GPU that MLX has, against float64 references: one line a case, then a table.

    python scripts/check_kernels.py                     the whole grid on Metal or CUDA
    python scripts/check_kernels.py --emulator          the same on the tests' emulator, which needs no GPU
    python scripts/check_kernels.py --only 'decode float16' --part 1/5

Exits 1 when a case fails. A case that takes longer than --limit seconds ends the run with a traceback.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("MLX_ENABLE_TF32", "0")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mlx.core as mx

from mlxpaged.kernels.launch import CudaLauncher, Launcher, MetalLauncher
from tests.kernels.cases import Case, all_cases


def main() -> int:
    arguments = parse_arguments()
    launch = make_launcher(arguments.launcher)
    part, _, parts = arguments.part.partition("/")
    cases = [case for case in all_cases() if arguments.only in case.name][int(part) - 1 :: int(parts)]
    print(f"{len(cases)} cases on {type(launch).__name__}, {mx.default_device()}, mlx {mx.__version__}", flush=True)
    results = [check(case, launch, arguments) for case in cases]
    print_summary(cases, results)
    return int(any(error > case.tolerance for case, error in zip(cases, results, strict=True)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulator", dest="launcher", action="store_const", const="tests.emulator:EmulatorLauncher")
    parser.add_argument("--launcher", metavar="MODULE:CLASS", help="another launcher (default: the GPU's)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name holds this")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="only every Nth of them, from the Kth on")
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="for one case (default: 120)")
    parser.add_argument("--quiet", action="store_true", help="no line for a case that passes")
    return parser.parse_args()


def make_launcher(name: str | None) -> Launcher:
    if name:
        module, _, attribute = name.partition(":")
        return getattr(importlib.import_module(module), attribute)()
    if mx.metal.is_available():
        return MetalLauncher()
    if mx.cuda.is_available():
        return CudaLauncher()
    sys.exit("MLX has no GPU here; use --emulator")


def check(case: Case, launch: Launcher, arguments: argparse.Namespace) -> float:
    """The case's error; infinite when it raises, after its whole message (compilers' logs included) was printed."""
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    started = time.perf_counter()
    try:
        error = case.run(launch)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        error = float("inf")
    finally:
        faulthandler.cancel_dump_traceback_later()
    failed = error > case.tolerance
    if failed or not arguments.quiet:
        seconds = time.perf_counter() - started
        print(f"{'FAIL' if failed else 'ok  '} {error:8.1e} {seconds:6.2f}s {case.name}", flush=True)
    return error


def print_summary(cases: list[Case], errors: list[float]) -> None:
    """The worst error per kernel and dtype."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for case, error in zip(cases, errors, strict=True):
        groups[case.name.split()[0], getattr(case, "dtype", "float32")].append((error, case.tolerance))
    print(f"\n{'kernel':<8} {'dtype':<9} {'cases':>5} {'failed':>6} {'worst':>8} {'allowed':>8}")
    for (kernel, dtype), found in groups.items():
        failed = sum(error > tolerance for error, tolerance in found)
        print(f"{kernel:<8} {dtype:<9} {len(found):5} {failed:6} {max(found)[0]:8.1e} {found[0][1]:8.1e}")


if __name__ == "__main__":
    sys.exit(main())
