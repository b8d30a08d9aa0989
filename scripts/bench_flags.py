"""What the engine's bench scripts have in common on the command line: flags of the model, kinds of numbers, and how a
run ends. Owns no figure and measures nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxpaged.errors import MlxpagedError
from mlxpaged.model.startup import before_mlx

Figures = dict[str, Any]


def add_model_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Which model is measured, and how its weights are held."""
    parser.add_argument("--model", choices=("smollm2", "1b", "8b", "tiny"), default=default)
    parser.add_argument("--bits", type=int, choices=(32, 16, 8, 4), help="of a weight (default: 32 on a CPU, else 16)")


def at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number of `least` or more."""

    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small; {least} or more")
        return value

    return read


def length_range(text: str) -> tuple[int, int]:
    """Reads "512" or "64-2048"."""
    low, _, high = text.partition("-")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no length; give one such as 512, or a range such as 64-2048")
    return found


def report_of(bench: Callable[[argparse.Namespace], Figures], arguments: argparse.Namespace) -> Figures:
    """What `bench` found, mlx prepared before it; an error is one line on stderr and ends the program with 2."""
    before_mlx()
    try:
        return bench(arguments)
    except MlxpagedError as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
