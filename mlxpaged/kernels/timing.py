"""Which way of decoding is faster at which size. Owns both measurements and the choice made from them; never decides
whether the kernels may be used at all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import mlx.core as mx
import numpy as np

from ..config import BLOCK_SIZE
from .kv_gather import kv_gather
from .launch import Launcher, new_token, padded
from .paged_decode import paged_decode
from .template import DTYPES, KernelTemplate

ROWS = (8, 1, 64, 2, 32, 4, 16)
CONTEXTS = (1024, 128, 8192, 256, 4096, 512, 2048)
"""Sizes that are timed, the telling ones first: when time runs out, the rest takes its nearest neighbour's answer."""

_MOST_BYTES = 256 << 20
"""K and V of a timed size; larger ones are left out."""

_LARGEST_EXPONENT = 24


@dataclass(frozen=True, slots=True)
class Ways:
    """Two functions that each do the same work `calls` times and wait for it."""

    kernel: Callable[[], None]
    gather: Callable[[], None]
    calls: int = 1


@dataclass(frozen=True, slots=True)
class BucketTime:
    """Seconds that attention of one step takes over all layers, for `rows` rows of `context` tokens."""

    rows: int
    context: int
    kernel_s: float
    gather_s: float


@dataclass(frozen=True)
class PathChoice:
    """The measured answer to "paged_decode, or gather and fused attention?". Without any times: paged_decode."""

    times: tuple[BucketTime, ...] = ()

    def use_kernel(self, rows: int, context: int) -> bool:
        """Whether paged_decode is the faster way for so many rows whose longest context is `context`."""
        return self._answers[_exponent(rows)][_exponent(context)]

    @cached_property
    def _answers(self) -> list[list[bool]]:
        """By powers of two of rows and context: asked in every layer of every step, so looked up, not computed."""
        span = range(_LARGEST_EXPONENT + 1)
        return [[self._nearest(row, context) for context in span] for row in span]

    def _nearest(self, row_exponent: int, context_exponent: int) -> bool:
        if not self.times:
            return True

        def distance(time: BucketTime) -> int:
            return abs(_exponent(time.rows) - row_exponent) + abs(_exponent(time.context) - context_exponent)

        nearest = min(self.times, key=distance)
        return nearest.kernel_s <= nearest.gather_s


def _exponent(size: int) -> int:
    return min(round(math.log2(max(size, 1))), _LARGEST_EXPONENT)


def time_paths(
    prepare: Callable[[int, int], Ways | None],
    *,
    budget_s: float,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> PathChoice:
    """Time both ways size by size until `budget_s` seconds are spent; the first size is always timed.

    `prepare(rows, context)` gives the ways, or None where that size is left out; see best_of().
    """
    started = clock()
    times: list[BucketTime] = []
    sizes = [(row, context) for row in range(len(rows)) for context in range(len(contexts))]
    for row, context in sorted(sizes, key=lambda size: (size[0] // 3 + size[1] // 3, sum(size))):
        if times and clock() - started >= budget_s:
            break
        ways = prepare(rows[row], contexts[context])
        if ways is not None:
            seconds = best_of((ways.kernel, ways.gather), ways.calls, repeats=repeats, clock=clock)
            times.append(BucketTime(rows[row], contexts[context], *seconds))
    return PathChoice(tuple(times))


def best_of(
    ways: Sequence[Callable[[], None]],
    calls: int,
    *,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of one of the `calls` calls that each way makes: the best of so many, taken in turns after one that is
    not measured."""
    best = [math.inf] * len(ways)
    for way in ways:
        way()
    for _ in range(repeats):
        for index, way in enumerate(ways):
            before = clock()
            way()
            best[index] = min(best[index], (clock() - before) / calls)
    return best


def time_decode(launch: Launcher, templates: Sequence[KernelTemplate], *, budget_s: float = 4.0) -> PathChoice:
    """Times of a whole model's layers: each template's own, times its number of layers, at the sizes that all of them
    were timed at."""
    share_s = budget_s / len(templates)
    choices = [time_paths(partial(prepare, launch, template), budget_s=share_s) for template in templates]
    return summed(choices, [template.layers for template in templates])


def summed(choices: Sequence[PathChoice], layers: Sequence[int]) -> PathChoice:
    """One choice for layers of several kinds, `layers[i]` of the kind behind `choices[i]`."""
    by_size = [{(time.rows, time.context): time for time in choice.times} for choice in choices]
    common = [size for size in by_size[0] if all(size in times for times in by_size)]
    return PathChoice(
        tuple(
            BucketTime(
                *size,
                sum(count * times[size].kernel_s for count, times in zip(layers, by_size, strict=True)),
                sum(count * times[size].gather_s for count, times in zip(layers, by_size, strict=True)),
            )
            for size in common
        )
    )


def prepare(launch: Launcher, template: KernelTemplate, rows: int, context: int) -> Ways | None:
    """Both ways over the same pools of shuffled blocks; None where K and V would take too much memory."""
    elements = sum(map(math.prod, template.pool_shapes(rows * context // BLOCK_SIZE)))
    num_bytes = elements * DTYPES[template.dtype].size
    if num_bytes > _MOST_BYTES:
        return None
    layer = LayerWays(launch, template, rows, context, calls=max(1, min(_MOST_CALLS, _MOST_BYTES // 4 // num_bytes)))
    return Ways(layer.by_kernel, layer.by_gather, layer.calls)


_MOST_CALLS = 8


class LayerWays:
    """One attention layer of `rows` rows, each `context` tokens long, and the two ways to attend over it. A way makes
    `calls` calls, each taking the last one's token, so that starting and waiting weigh little."""

    def __init__(self, launch: Launcher, template: KernelTemplate, rows: int, context: int, calls: int) -> None:
        self._launch, self._template, self.calls = launch, template, calls
        rng, dtype = np.random.default_rng(0), DTYPES[template.dtype]
        self._context, self._seen = context, min(context, template.window or context)
        blocks = (rng.permutation(rows * context // BLOCK_SIZE) + 1).reshape(rows, -1)
        slots = (blocks[..., None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(rows, -1)
        self._tables, self._lengths = padded(blocks), padded(np.full(rows, context))
        self._slots = padded(slots[:, context - self._seen :].reshape(-1))
        self._keys, self._values = (mx.zeros(shape, dtype) for shape in template.pool_shapes(1 + blocks.size))
        heads = template.num_kv_heads * template.group
        queries = rng.standard_normal((rows, 1, heads, template.key_width), np.float32)
        self._queries = mx.array(queries).astype(dtype)
        self._sinks = mx.zeros((heads,), dtype) if template.sinks else None
        self._mask = mx.ones((rows, 1, 1, self._seen), mx.bool_)
        mx.eval(self._keys, self._values, self._queries, self._mask)

    def by_kernel(self) -> None:
        token, outs = new_token(), []
        for _ in range(self.calls):
            out, token = paged_decode(
                self._launch,
                self._queries,
                self._keys,
                self._values,
                self._tables,
                self._lengths,
                token,
                max_context=self._context,
                scale=1.0,
                window=self._template.window,
                sinks=self._sinks,
            )
            outs.append(out)
        mx.eval(outs, token)

    def by_gather(self) -> None:
        """As the model does it: gather, a padded batch with heads first, made contiguous, then fused attention."""
        token, outs, rows = new_token(), [], len(self._queries)
        for _ in range(self.calls):
            keys, values, token = kv_gather(
                self._launch, self._keys, self._values, self._slots, rows * self._seen, token
            )
            keys, values = (run.reshape(rows, -1, *run.shape[1:]).transpose(0, 2, 1, 3) for run in (keys, values))
            out = mx.fast.scaled_dot_product_attention(
                self._queries.transpose(0, 2, 1, 3),
                mx.contiguous(keys),
                mx.contiguous(values),
                scale=1.0,
                mask=self._mask,
                sinks=self._sinks,
            )
            outs.append(out)
        mx.eval(outs, token)
