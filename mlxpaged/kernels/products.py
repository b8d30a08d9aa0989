"""Does skinny_matmul work on this device? Owns its self-test for the kinds of product that a model has. Never decides
which products it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .launch import Launcher
from .selftest import SelfTestCase, ask, float64, relative_error
from .skinny_matmul import MOST_ROWS, SPEC, skinny_matmul
from .template import DTYPES, TOLERANCES

_ROWS = (2, 12, MOST_ROWS)  # one for each number of tiles that is compiled
_OUTPUTS = 56  # the last threadgroup's are not all real
_WIDTH = 640  # five spans of packed weights, twenty of dense ones: no whole number of rounds


@dataclass(frozen=True, slots=True)
class ProductKind:
    """The rows' dtype, and how the weight is packed: bits 0 is dense."""

    dtype: str
    bits: int = 0
    group_size: int = 64

    @property
    def name(self) -> str:
        return f"{self.dtype} {f'{self.bits} bits in groups of {self.group_size}' if self.bits else 'dense'}"


def why_not_skinny(launch: Launcher, kinds: Sequence[ProductKind]) -> str | None:
    """None where skinny_matmul agrees with a float64 reference on products of all `kinds`; else one line that says what
    it did. Compiles what a model of these kinds starts, and little more."""
    for kind in kinds:
        for rows in _ROWS:
            result = ask(_case(kind, rows), launch)
            if not result.ok:
                return result.line
    return None


def _case(kind: ProductKind, num_rows: int) -> SelfTestCase:
    run = _packed_error if kind.bits else _dense_error
    name = f"{num_rows} rows of {kind.name}"
    return SelfTestCase(SPEC.name, name, TOLERANCES[kind.dtype], lambda launch: run(launch, kind, num_rows))


def _dense_error(launch: Launcher, kind: ProductKind, num_rows: int) -> float:
    rng = np.random.default_rng(num_rows)
    rows, weight = (_normal(rng, (count, _WIDTH), kind) for count in (num_rows, _OUTPUTS))
    return relative_error(skinny_matmul(launch, rows, weight), float64(rows) @ float64(weight).T)


def _packed_error(launch: Launcher, kind: ProductKind, num_rows: int) -> float:
    """Packed on the host: what MLX packs and unpacks on the device is not taken on trust."""
    rng = np.random.default_rng(num_rows)
    rows = _normal(rng, (num_rows, _WIDTH), kind)
    scales, biases = (_normal(rng, (_OUTPUTS, _WIDTH // kind.group_size), kind) for _ in "sb")
    factors, offsets = (np.repeat(float64(array), kind.group_size, axis=1) for array in (scales, biases))
    integers = rng.integers(0, 1 << kind.bits, (_OUTPUTS, _WIDTH), np.uint32)
    shifts = np.arange(0, 32, kind.bits, dtype=np.uint32)
    words = (integers.reshape(_OUTPUTS, -1, len(shifts)) << shifts).sum(axis=-1, dtype=np.uint32)
    out = skinny_matmul(launch, rows, mx.array(words), scales, biases, bits=kind.bits, group_size=kind.group_size)
    return relative_error(out, float64(rows) @ (integers * factors + offsets).T)


def _normal(rng: np.random.Generator, shape: tuple[int, int], kind: ProductKind) -> mx.array:
    return mx.array(rng.standard_normal(shape, np.float32)).astype(DTYPES[kind.dtype])
