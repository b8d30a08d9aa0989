"""Does skinny_matmul work on this device, and where is it faster than MLX's products? Owns its self-test and its timing
for the products that a model has, and what is remembered of both between starts. Knows no models.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .launch import Launcher
from .question import SelfTestCase, ask, float64, relative_error
from .records import read_json, record_file, write_json
from .skinny_matmul import DENSE, MOST_ROWS, PACKED, SPEC, Split, row_tiles, skinny_matmul
from .template import DTYPES, TOLERANCES
from .timing import best_of

ROWS = (8, 16, MOST_ROWS)
"""Numbers of rows that are timed: the most that one number of tiles serves."""

_TESTED_ROWS = (2, 12, MOST_ROWS)
_OUTPUTS = 56  # the last threadgroup's are not all real
_WIDTH = 640  # five spans of packed weights, twenty of dense ones: no whole number of rounds

_MOST_CALLS = 8
_MARGIN = 0.97  # a tie goes to MLX

Weight = Sequence[mx.array]
"""The weight alone, or packed with its scales and biases."""

Way = Callable[..., mx.array]
Compile = Callable[[Callable[..., mx.array]], Callable[..., mx.array]]


@dataclass(frozen=True, slots=True)
class ProductKind:
    """The rows' dtype, and how the weight is packed: bits 0 is dense."""

    dtype: str
    bits: int = 0
    group_size: int = 64

    @property
    def name(self) -> str:
        return f"{self.dtype} {f'{self.bits} bits in groups of {self.group_size}' if self.bits else 'dense'}"


@dataclass(frozen=True, slots=True)
class Product:
    """Rows of `width` elements times a weight with so many outputs."""

    kind: ProductKind
    outputs: int
    width: int


@dataclass(frozen=True, slots=True)
class ProductTime:
    """Seconds of one product of `rows` rows; `group_size` is 0 for a dense weight."""

    rows: int
    outputs: int
    width: int
    bits: int
    group_size: int
    skinny_s: float
    mlx_s: float


@dataclass(frozen=True)
class ProductChoice:
    """The measured answer to "skinny_matmul, or MLX's product?". What was not timed is MLX's."""

    times: tuple[ProductTime, ...] = ()

    def faster(self, rows: int, outputs: int, width: int, bits: int, group_size: int) -> bool:
        """Whether skinny_matmul is the faster way for so many rows of such a product."""
        return (row_tiles(rows), outputs, width, bits, group_size) in self._won

    @property
    def wins(self) -> int:
        """At how many of the timed sizes skinny_matmul is faster."""
        return len(self._won)

    @cached_property
    def _won(self) -> frozenset[tuple[int, int, int, int, int]]:
        return frozenset(
            (row_tiles(time.rows), time.outputs, time.width, time.bits, time.group_size)
            for time in self.times
            if time.skinny_s <= _MARGIN * time.mlx_s
        )


def why_not_skinny(launch: Launcher, kinds: Sequence[ProductKind]) -> str | None:
    """None where skinny_matmul agrees with a float64 reference on products of all `kinds`; else one line that says what
    it did. Compiles what a model of these kinds starts, and nothing more."""
    for case in _cases(kinds):
        result = ask(case, launch)
        if not result.ok:
            return result.line
    return None


def _cases(kinds: Sequence[ProductKind]) -> Iterator[SelfTestCase]:
    for kind in kinds:
        for split in PACKED if kind.bits else DENSE:
            for rows in _TESTED_ROWS:
                yield _case(kind, rows, split)


def _case(kind: ProductKind, num_rows: int, split: Split) -> SelfTestCase:
    error = _packed_error if kind.bits else _dense_error
    name = f"{num_rows} rows of {kind.name}, {split.tiles} tiles"
    return SelfTestCase(SPEC.name, name, TOLERANCES[kind.dtype], lambda launch: error(launch, kind, num_rows, split))


def _dense_error(launch: Launcher, kind: ProductKind, num_rows: int, split: Split) -> float:
    rng = np.random.default_rng(num_rows)
    rows, weight = (_normal(rng, (count, _WIDTH), kind) for count in (num_rows, _OUTPUTS))
    return relative_error(skinny_matmul(launch, rows, weight, split=split), float64(rows) @ float64(weight).T)


def _packed_error(launch: Launcher, kind: ProductKind, num_rows: int, split: Split) -> float:
    """Packed on the host: what MLX packs and unpacks on the device is not taken on trust."""
    rng = np.random.default_rng(num_rows)
    rows = _normal(rng, (num_rows, _WIDTH), kind)
    scales, biases = (_normal(rng, (_OUTPUTS, _WIDTH // kind.group_size), kind) for _ in "sb")
    factors, offsets = (np.repeat(float64(array), kind.group_size, axis=1) for array in (scales, biases))
    integers = rng.integers(0, 1 << kind.bits, (_OUTPUTS, _WIDTH), np.uint32)
    shifts = np.arange(0, 32, kind.bits, dtype=np.uint32)
    words = (integers.reshape(_OUTPUTS, -1, len(shifts)) << shifts).sum(axis=-1, dtype=np.uint32)
    out = skinny_matmul(
        launch, rows, mx.array(words), scales, biases, bits=kind.bits, group_size=kind.group_size, split=split
    )
    return relative_error(out, float64(rows) @ (integers * factors + offsets).T)


def _normal(rng: np.random.Generator, shape: tuple[int, int], kind: ProductKind) -> mx.array:
    return mx.array(rng.standard_normal(shape, np.float32)).astype(DTYPES[kind.dtype])


def time_products(
    launch: Launcher,
    weights: Mapping[Product, Sequence[Weight]],
    *,
    budget_s: float = 3.0,
    clock: Callable[[], float] = time.perf_counter,
    compiled: Compile = mx.compile,
) -> ProductChoice:
    """Time both ways of each product at each number of rows, on the model's own `weights`, until `budget_s` seconds are
    spent: those first whose weights take most of a step."""
    started, times = clock(), list[ProductTime]()
    products = sorted(weights, key=lambda product: -sum(array.nbytes for one in weights[product] for array in one))
    for product in products:
        for rows in ROWS:
            if times and clock() - started >= budget_s:
                return ProductChoice(tuple(times))
            # As linears.py lays them out, which costs nothing where they lie so.
            calls = [[mx.contiguous(array) for array in weight] for weight in weights[product][:_MOST_CALLS]]
            ways = by_skinny(launch, product.kind), by_mlx(product.kind)
            chains = [product_chain(way, product, rows, calls, compiled) for way in ways]
            seconds = best_of(chains, len(calls), clock=clock)
            bits, group_size = product.kind.bits, product.kind.group_size
            times.append(ProductTime(rows, product.outputs, product.width, bits, group_size if bits else 0, *seconds))
    return ProductChoice(tuple(times))


def product_chain(
    way: Way, product: Product, num_rows: int, weights: Sequence[Weight], compiled: Compile = mx.compile
) -> Callable[[], None]:
    """A chain of products of `num_rows` rows by `way`, each taking something of the last one's result and replayed from
    a graph, as a decode step's are. The call waits for its end."""
    rows, parts = mx.ones((num_rows, product.width), DTYPES[product.kind.dtype]), len(weights[0])
    flat = [array for weight in weights for array in weight]
    mx.eval(rows, flat)

    def products(rows: mx.array, *flat: mx.array) -> mx.array:
        given = rows
        for start in range(0, len(flat), parts):
            given = rows + 0 * way(given, *flat[start : start + parts])[:, :1]
        return given

    run = compiled(products)
    return lambda: mx.eval(run(rows, *flat))


def by_skinny(launch: Launcher, kind: ProductKind, split: Split | None = None) -> Way:
    """(rows, *weight) -> their product by skinny_matmul."""
    return lambda rows, *weight: skinny_matmul(
        launch, rows, *weight, bits=kind.bits, group_size=kind.group_size, split=split
    )


def by_mlx(kind: ProductKind) -> Way:
    """The same by MLX."""
    if not kind.bits:
        return lambda rows, weight: rows @ weight.T
    return lambda rows, weight, scales, biases: mx.quantized_matmul(
        rows, weight, scales, biases, transpose=True, bits=kind.bits, group_size=kind.group_size
    )


def remembered_choice(
    launcher: Launcher,
    device: str,
    weights: Mapping[Product, Sequence[Weight]],
    find: Callable[[], ProductChoice | None],
) -> ProductChoice | None:
    """What `find` finds, or found at an earlier start on this device, for these products and this kernel. None, where
    it found out nothing, is not kept."""
    products = sorted(str(asdict(product)) for product in weights)
    path = record_file("products", [type(launcher).__name__, device, SPEC.header, SPEC.source, products])
    known = _read(path)
    if known is None:
        known = find()
        if known is not None:
            write_json(path, {"times": [asdict(time) for time in known.times]})
    return known


def _read(path: Path) -> ProductChoice | None:
    def parse(value: Any) -> ProductChoice:
        times = tuple(ProductTime(**time) for time in value["times"])
        if not all(time.rows > 0 and 0 <= min(time.skinny_s, time.mlx_s) < math.inf for time in times):
            raise ValueError(f"times are {times}")
        return ProductChoice(times)

    return read_json(path, parse)
