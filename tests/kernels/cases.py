"""The kernels' case grid: what is run on every launcher (emulator, Metal, CUDA) and held against float64 references.

Three base variants see every length and row count; everything else is combined so that each pair of values meets in
some case. Slots that no case may read hold NaN, so one wrong read spoils an output.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlxpaged.kernels.block_copy import block_copy, block_copy_reference
from mlxpaged.kernels.kv_gather import kv_gather, kv_gather_reference, run_slots
from mlxpaged.kernels.kv_write import kv_write, kv_write_reference
from mlxpaged.kernels.launch import Launcher, new_token, padded
from mlxpaged.kernels.paged_decode import paged_decode, paged_decode_reference
from mlxpaged.kernels.rope_write import pairs, rope_write, rotate_reference
from mlxpaged.kernels.skinny_matmul import DENSE, PACKED, skinny_matmul
from tests.kernels.draw_cases import draw_cases

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
TOLERANCES = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
LENGTHS = (1, 15, 16, 17, 511, 512, 513, 2100)
RAGGED = (17, 0, 300, 1, 64, 15, 129, 16, 513)


class Case(Protocol):
    """One call (or a short chain) and its reference. `run` returns max|error| / max|reference|."""

    @property
    def name(self) -> str: ...
    @property
    def tolerance(self) -> float: ...
    def run(self, launch: Launcher) -> float: ...


@dataclass(frozen=True)
class DecodeCase:
    """paged_decode, with its reduce where there are several partitions. `lengths`: one row each.
    `shared`: rows share their first block, as requests with one prefix do."""

    dtype: str = "float32"
    widths: tuple[int, int] = (64, 64)
    group: int = 4
    lengths: tuple[int, ...] = RAGGED
    num_kv_heads: int = 2
    positions: int = 1
    block_size: int = 16
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    partitions: int = 1
    shared: bool = False

    @property
    def name(self) -> str:
        lengths = ",".join(map(str, self.lengths))
        parts = [f"decode {self.dtype} {self.widths[0]}/{self.widths[1]} G{self.group} Q{self.positions}"]
        parts += [f"block {self.block_size} in {self.partitions} rows {len(self.lengths)} [{lengths}]"]
        parts += [f"window {self.window}"] * bool(self.window) + [f"cap {self.softcap}"] * bool(self.softcap)
        return " ".join([*parts, *["sinks"] * self.sinks, *["shared"] * self.shared])

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]

    def run(self, launch: Launcher) -> float:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        tables, num_blocks = self.tables(rng)
        dtype, num_heads = DTYPES[self.dtype], self.num_kv_heads * self.group
        key_pool, value_pool = (self._pool(rng, tables, num_blocks, width) for width in self.widths)
        queries = normal(rng, (len(self.lengths), self.positions, num_heads, self.widths[0]), dtype)
        sinks = normal(rng, (num_heads,), dtype) if self.sinks else None
        lengths = np.array(self.lengths)
        attention = {"scale": self.widths[0] ** -0.5 * 2, "window": self.window, "softcap": self.softcap}
        out, token = paged_decode(
            launch,
            queries,
            key_pool,
            value_pool,
            padded(tables),
            padded(lengths),
            new_token(),
            max_context=max(self.lengths),
            sinks=sinks,
            partitions=self.partitions,
            **attention,
        )
        expected = paged_decode_reference(
            *map(float64, (queries, key_pool, value_pool)),
            tables,
            lengths,
            sinks=None if sinks is None else float64(sinks),
            **attention,
        )
        return token_error(token) + relative_error(out, expected)

    def tables(self, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """Shuffled block tables [rows, width] without the blocks behind the window, and the pool's block count."""
        counts = [-(-length // self.block_size) for length in self.lengths]
        num_blocks = 2 + sum(counts)
        free = iter(rng.permutation(num_blocks - 1) + 1)
        tables = np.zeros((len(counts), max(8, *counts) + 1), np.int32)
        for table, count in zip(tables, counts, strict=True):
            table[:count] = list(itertools.islice(free, count))
        if self.shared:
            longest = int(np.argmax(counts))
            for table, length in zip(tables, self.lengths, strict=True):
                table[0] = tables[longest, 0] if length >= self.block_size else table[0]
        if self.window:
            for table, length in zip(tables, self.lengths, strict=True):
                first = max(0, length - self.positions + 1 - self.window)
                table[: first // self.block_size] = 0
        return tables, num_blocks

    def _pool(self, rng: np.random.Generator, tables: np.ndarray, num_blocks: int, width: int) -> mx.array:
        pool = np.full((num_blocks, self.block_size, self.num_kv_heads, width), np.nan, np.float32)
        for table, length in zip(tables, self.lengths, strict=True):
            slots = run_slots(table, 0, length, self.block_size)
            slots = slots[slots >= self.block_size]
            pool.reshape(-1, self.num_kv_heads, width)[slots] = rng.standard_normal(
                (len(slots), self.num_kv_heads, width)
            )
        return mx.array(pool).astype(DTYPES[self.dtype])


@dataclass(frozen=True)
class PoolCase:
    """What the kernels that move K and V share: a pool of random content. They must be exact."""

    dtype: str = "float32"
    widths: tuple[int, int] = (64, 64)
    num_kv_heads: int = 2
    block_size: int = 16
    tokens: int = 9
    tolerance: float = field(default=0.0, init=False)
    kernel = ""

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.dtype} {self.widths[0]}/{self.widths[1]} block {self.block_size} of {self.tokens}"

    def pools(self, rng: np.random.Generator) -> list[mx.array]:
        shape = (12, self.block_size, self.num_kv_heads)
        pools = [normal(rng, (*shape, width), DTYPES[self.dtype]) for width in self.widths]
        mx.eval(pools)
        return pools

    def run(self, launch: Launcher) -> float:
        return self.compare(launch, np.random.default_rng(zlib.crc32(self.name.encode())))

    def compare(self, launch: Launcher, rng: np.random.Generator) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class WriteCase(PoolCase):
    """kv_write of `tokens` tokens given as `source` dtype, every third one padding of the null block."""

    source: str = "float32"
    kernel = "write"

    @property
    def name(self) -> str:
        return f"{super().name} from {self.source}"

    def compare(self, launch: Launcher, rng: np.random.Generator) -> float:
        pools = self.pools(rng)
        before = [float64(pool) for pool in pools]
        slots = rng.permutation(np.arange(self.block_size, 12 * self.block_size))[: self.tokens]
        slots[::3] = rng.integers(0, self.block_size, len(slots[::3]))
        new = [normal(rng, (self.tokens, self.num_kv_heads, width), DTYPES[self.source]) for width in self.widths]
        token = kv_write(launch, *pools, *new, padded(slots), new_token())
        mx.eval(token)
        errors = [token_error(token)]
        for pool, old, vectors in zip(pools, before, new, strict=True):
            errors.append(relative_error(pool, kv_write_reference(old, float64(vectors.astype(pool.dtype)), slots)))
        return max(errors)


@dataclass(frozen=True)
class GatherCase(PoolCase):
    """kv_gather of `tokens` tokens of a shuffled table, from the middle of its first block."""

    kernel = "gather"

    def compare(self, launch: Launcher, rng: np.random.Generator) -> float:
        pools = self.pools(rng)
        start = self.block_size // 2
        slots = run_slots(rng.permutation(11) + 1, start, start + self.tokens, self.block_size)
        *gathered, token = kv_gather(launch, *pools, padded(slots), self.tokens, new_token())
        errors = [token_error(token)]
        for pool, run in zip(pools, gathered, strict=True):
            errors.append(relative_error(run, kv_gather_reference(float64(pool), slots)))
        return max(errors)


@dataclass(frozen=True)
class CopyCase(PoolCase):
    """block_copy of a whole block, of a part, of one slot, and of nothing into the null block."""

    kernel = "copy"

    def compare(self, launch: Launcher, rng: np.random.Generator) -> float:
        pools = self.pools(rng)
        before = [float64(pool) for pool in pools]
        copies = np.array([(3, 7, self.block_size), (3, 8, self.block_size // 2 - 1), (4, 9, 1), (5, 0, 4)])
        token = block_copy(launch, *pools, padded(copies), new_token())
        mx.eval(token)
        errors = [token_error(token)]
        for pool, old in zip(pools, before, strict=True):
            errors.append(relative_error(pool, block_copy_reference(old, copies)))
        return max(errors)


@dataclass(frozen=True)
class RopeCase:
    """rope_write of `tokens` tokens, `dims` elements of each key and query rotated, every third token padding of the
    null block. `scale` is exact in every dtype. `layout` of queries, keys and values: views of one "joined" product, as
    models make them, "whole" arrays of their own, or "turned" ones whose neighbours in memory are tokens."""

    dtype: str = "float32"
    widths: tuple[int, int] = (64, 64)
    dims: int = 64
    traditional: bool = False
    group: int = 3
    num_kv_heads: int = 2
    tokens: int = 9
    layout: str = "joined"
    scale: float = 1.0

    @property
    def name(self) -> str:
        kind = "traditional " * self.traditional + f"times {self.scale} " * (self.scale != 1) + self.layout
        return (
            f"rope {self.dtype} {self.widths[0]}/{self.widths[1]} {self.dims} rotated {kind} "
            f"{self.num_kv_heads}x{self.group} heads of {self.tokens}"
        )

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]

    def run(self, launch: Launcher) -> float:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        shape, dtype = (12, 16, self.num_kv_heads), DTYPES[self.dtype]
        pools = [normal(rng, (*shape, width), dtype) for width in self.widths]
        mx.eval(pools)
        before = [float64(pool) for pool in pools]
        slots = rng.permutation(np.arange(16, 12 * 16))[: self.tokens]
        slots[::3] = rng.integers(0, 16, len(slots[::3]))
        queries, keys, values = self.vectors(rng)
        turns = self.rotations(rng)
        rotated, token = rope_write(
            launch,
            *pools,
            queries,
            keys,
            values,
            mx.array(turns),
            padded(slots),
            new_token(),
            dims=self.dims,
            traditional=self.traditional,
            scale=self.scale,
        )
        mx.eval(rotated, token)
        way = (turns, self.dims, self.traditional, self.scale)
        wanted = [rotate_reference(float64(x[:, :, 0]), *way) for x in (queries, keys)]
        new = (wanted[1], float64(values[:, :, 0]))
        stored = [kv_write_reference(old, vectors, slots) for old, vectors in zip(before, new, strict=True)]
        if token_error(token) or relative_error(pools[1], stored[1]):
            return float("inf")  # only what is rotated is rounded
        return max(relative_error(rotated, wanted[0][:, None]), relative_error(pools[0], stored[0]))

    def vectors(self, rng: np.random.Generator) -> list[mx.array]:
        """Queries, keys and values [tokens, heads, 1, width]."""
        heads = (self.num_kv_heads * self.group, self.num_kv_heads, self.num_kv_heads)
        widths = (self.widths[0], *self.widths)
        sizes, dtype = [count * width for count, width in zip(heads, widths, strict=True)], DTYPES[self.dtype]
        if self.layout == "joined":
            parts = mx.split(normal(rng, (self.tokens, sum(sizes)), dtype), np.cumsum(sizes)[:-1].tolist(), axis=-1)
        else:
            parts = [normal(rng, (self.tokens, size), dtype) for size in sizes]
        if self.layout == "turned":
            parts = [mx.contiguous(part.T).T for part in parts]
        return [
            part.reshape(self.tokens, 1, count, -1).transpose(0, 2, 1, 3)
            for part, count in zip(parts, heads, strict=True)
        ]

    def rotations(self, rng: np.random.Generator) -> np.ndarray:
        """Any angles, and factors of about 1 beyond `dims`; one token more."""
        turns = 1 + rng.standard_normal((self.tokens + 1, self.widths[0])).astype(np.float32) / 8
        angles = rng.uniform(-np.pi, np.pi, (self.tokens + 1, self.dims // 2))
        first, second = pairs(self.dims, self.traditional)
        turns[:, first], turns[:, second] = np.cos(angles), np.sin(angles)
        return turns


@dataclass(frozen=True)
class SkinnyCase:
    """skinny_matmul of `rows` rows of `width` elements with a weight of `outputs` outputs, dense or of `bits` bits,
    split as for many outputs if `wide`."""

    dtype: str = "bfloat16"
    rows: int = 9
    outputs: int = 72
    width: int = 256
    bits: int = 0
    group_size: int = 64
    wide: bool = False

    @property
    def name(self) -> str:
        packing = f"{self.bits} bits in groups of {self.group_size}" if self.bits else "dense"
        size = f"{self.rows}x{self.width} times {self.outputs}"
        return f"skinny {self.dtype} {size} {packing}{' wide' * self.wide}"

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]

    def run(self, launch: Launcher) -> float:
        rng, dtype = np.random.default_rng(zlib.crc32(self.name.encode())), DTYPES[self.dtype]
        rows, weight = normal(rng, (self.rows, self.width), dtype), normal(rng, (self.outputs, self.width), dtype)
        if not self.bits:
            out = skinny_matmul(launch, rows, weight, split=DENSE[self.wide])
            return relative_error(out, float64(rows) @ float64(weight).T)
        packing = {"group_size": self.group_size, "bits": self.bits}
        words, *factors = mx.quantize(weight, **packing)
        wide = mx.dequantize(words, *(array.astype(mx.float32) for array in factors), **packing)
        out = skinny_matmul(launch, rows, words, *factors, **packing, split=PACKED[self.wide])
        return relative_error(out, float64(rows) @ float64(wide).T)


@dataclass(frozen=True)
class OrderCase:
    """`steps` of write -> decode over `layers` layers in one lazy graph: every step overwrites the same slots, and its
    decode must see just that. Only the tokens keep the order."""

    layers: int = 3
    steps: int = 24
    tolerance: float = 0.0

    @property
    def name(self) -> str:
        return f"order of {self.steps} steps over {self.layers} layers"

    def run(self, launch: Launcher) -> float:
        rng = np.random.default_rng(0)
        pools = [[mx.zeros((40, 16, 2, 64)) for _ in "kv"] for _ in range(self.layers)]
        mx.eval(pools)
        tables = padded(np.arange(1, 33).reshape(4, 8))
        slots, lengths = padded(np.arange(1, 33, 8) * 16), padded(np.ones(4))
        token = new_token()
        expected, seen = [], []
        for _, (key_pool, value_pool) in itertools.product(range(self.steps), pools):
            values = normal(rng, (4, 2, 64), mx.float32)
            token = kv_write(launch, key_pool, value_pool, values, values, slots, token)
            queries = values.reshape(4, 1, 2, 64)
            out, token = paged_decode(
                launch, queries, key_pool, value_pool, tables, lengths, token, max_context=1, scale=1.0
            )
            expected.append(values.reshape(out.shape))
            seen.append(out)
        return relative_error(mx.stack(seen), float64(mx.stack(expected)))


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def relative_error(got: mx.array, expected: np.ndarray) -> float:
    """max|error| / max|expected|; infinite where something is not finite."""
    difference = np.abs(float64(got) - expected)
    if not np.isfinite(difference).all():
        return float("inf")
    return float(difference.max() / max(np.abs(expected).max(), 1e-30))


def token_error(token: mx.array) -> float:
    return 0.0 if np.array(token).tolist() == [1] * 8 else float("inf")


BASES = (
    DecodeCase("float32", (64, 64), group=3),
    DecodeCase("float16", (128, 128), group=4),
    DecodeCase("bfloat16", (64, 64), group=8, window=128, sinks=True),
)

PAIRED: dict[str, tuple] = {
    "widths": (
        *((width, width) for width in (32, 64, 72, 80, 96, 112, 128, 192, 256)),
        *((192, 128), (64, 128), (128, 80)),
    ),
    "group": (1, 2, 3, 4, 5, 7, 8, 12, 16),
    "dtype": ("float32", "float16", "bfloat16"),
    "positions": (1, 2, 5, 16),
    "block_size": (8, 16, 32, 64),
    "window": (None, 1, 33, 100),
    "sinks": (False, True),
    "softcap": (None, 30.0),
    "partitions": (1, 2, 4),
    "shared": (False, True),
    "lengths": ((17, 200), (129, 0, 64), (1, 15, 16, 150)),
}


def base_cases() -> Iterator[DecodeCase]:
    """Every length alone, every row count ragged, empty rows, partitions of several sizes: for the three bases."""
    for base in BASES:
        for length in LENGTHS:
            yield replace(base, lengths=(length,), partitions=-(-length // 512))
        for rows in (1, 7, 8, 9):
            yield replace(base, lengths=RAGGED[-rows:])
            yield replace(base, lengths=RAGGED[-rows:], partitions=8, shared=True)
        yield replace(base, lengths=(0, 0, 0))


def paired_cases(seed: int = 0) -> Iterator[DecodeCase]:
    """Cases in which every two values of PAIRED meet at least once, found greedily: each case is the best of 200."""
    rng = np.random.default_rng(seed)
    names = list(PAIRED)
    left = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(PAIRED[a]))
        for j in range(len(PAIRED[b]))
    }
    while left:
        wanted = dict(min(left, key=str))
        best: set = set()
        for _ in range(200):
            picks = {name: wanted.get(name, int(rng.integers(len(PAIRED[name])))) for name in names}
            covered = set(itertools.combinations(picks.items(), 2)) & left
            if len(covered) > len(best):
                best, chosen = covered, picks
        left -= best
        yield DecodeCase(num_kv_heads=2, **{name: PAIRED[name][index] for name, index in chosen.items()})


def move_cases() -> Iterator[PoolCase]:
    for (index, dtype), tokens in itertools.product(enumerate(DTYPES), (1, 7, 8, 9, 64)):
        widths, block_size = ((64, 64), (80, 128), (256, 192))[index], (16, 8, 32)[index]
        for source in [dtype] if tokens != 9 else DTYPES:
            yield WriteCase(dtype, widths, block_size=block_size, tokens=tokens, source=source)
        yield GatherCase(dtype, widths, block_size=block_size, tokens=tokens)
    for dtype, block_size in itertools.product(DTYPES, (8, 16, 64)):
        yield CopyCase(dtype, (96, 112), block_size=block_size)


def rope_cases() -> Iterator[RopeCase]:
    """Whole and partial rotations of both kinds, widths of models and odd ones, in every dtype and layout."""
    for dtype, traditional in itertools.product(DTYPES, (False, True)):
        yield RopeCase(dtype, traditional=traditional)
        yield RopeCase(dtype, (128, 128), 128, traditional, group=4, tokens=8, scale=1.375)
        yield RopeCase(dtype, (80, 64), 32, traditional, group=1, num_kv_heads=5, tokens=1)
        yield RopeCase(dtype, (96, 128), 72, traditional, group=7, num_kv_heads=1, tokens=7, layout="whole")
        yield RopeCase(dtype, (256, 256), 64, traditional, group=2, tokens=17, layout="turned")


def skinny_cases() -> Iterator[SkinnyCase]:
    """Every number of tiles, outputs and spans that do not fill the last threadgroup or round, each packing."""
    for dtype in ("float16", "bfloat16"):
        for rows, outputs, width in ((1, 1, 32), (2, 40, 576), (8, 33, 1056), (17, 64, 64), (32, 100, 512)):
            yield SkinnyCase(dtype, rows, outputs, width, wide=outputs % 8 > 0)
        for bits, group_size, width in ((4, 32, 384), (4, 64, 1280), (4, 128, 128), (8, 64, 64), (8, 32, 1088)):
            yield SkinnyCase(dtype, 5 + width % 23, 72, width, bits, group_size, wide=group_size < 128)


def all_cases() -> list[Case]:
    """The whole grid."""
    return [OrderCase(), *move_cases(), *rope_cases(), *skinny_cases(), *draw_cases(), *base_cases(), *paired_cases()]
