"""What the self-test asks of each kernel, for a model's kinds of layer. Owns the cases: writes in place are seen after
a synchronise and by later kernels of one lazy graph, and every kernel agrees with its reference. Runs none of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..config import BLOCK_SIZE
from .block_copy import block_copy, block_copy_reference
from .draw import OFF, draw, draw_reference, packed_wishes
from .kv_gather import kv_gather, kv_gather_reference, run_slots
from .kv_write import kv_write, kv_write_reference
from .launch import Launcher, new_token, padded
from .paged_decode import paged_decode, paged_decode_reference
from .partitions import MOST_TOKENS, WHOLE_TOKENS
from .question import SelfTestCase, float64, relative_error
from .rope_write import pairs, rope_write, rotate_reference
from .template import DTYPES, TOLERANCES, KernelTemplate


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is asked. `order_kernels`: kernels of the lazy graph that tests the order, enough for several command
    buffers on every device. `positions`: query positions a row may have, one in decoding, a power of two in short
    chunks. `longest`: the longest context tried; beyond MOST_TOKENS a second kernel merges partitions."""

    order_kernels: int = 480
    positions: tuple[int, ...] = (1, 2, 4, 8, 16)
    longest: int = 4096 + 37


FULL = Extent()

_DRAWN_ROWS = 128


def selftest_cases(templates: Sequence[KernelTemplate], extent: Extent = FULL) -> Iterator[SelfTestCase]:
    """The cases in order: cheap and telling ones first, those of rope_write last, for what it may leave behind."""
    for template in templates:
        yield SelfTestCase("kv_write", f"read back {template.name}", 0.0, _bind(_read_back, template))
    for template in templates:
        name = f"order of {extent.order_kernels} kernels {template.name}"
        run = _bind(order_error, template, extent.order_kernels)
        yield SelfTestCase("kv_write", name, TOLERANCES[template.dtype], run)
    for template in templates:
        yield SelfTestCase("block_copy", template.name, 0.0, _bind(_copy, template))
        yield SelfTestCase("kv_gather", template.name, 0.0, _bind(_gather, template))
        for positions in extent.positions:
            for lengths in _lengths(template, extent.longest):
                name = f"{template.name} Q{positions} contexts {','.join(map(str, lengths))}"
                run = _bind(_decode, template, positions, lengths)
                yield SelfTestCase("paged_decode", name, TOLERANCES[template.dtype], run)
    for vocab in (1000, 4096 + 904):
        yield SelfTestCase("draw", f"{vocab} logits", 0.0, _seeded(_draw, vocab))
    for template in templates:
        for dims, traditional in ((template.key_width, False), (template.key_width // 2, True)):
            name = f"{template.name} {dims} rotated{' traditionally' * traditional}"
            run = _bind(_rope, template, dims, traditional)
            yield SelfTestCase("rope_write", name, TOLERANCES[template.dtype], run)


def _bind(run: Callable[..., float], template: KernelTemplate, *rest: object) -> Callable[[Launcher], float]:
    seed = zlib.crc32(f"{run.__name__} {template.name} {rest}".encode())
    return lambda launch: run(launch, template, np.random.default_rng(seed), *rest)


def _seeded(run: Callable[..., float], size: int) -> Callable[[Launcher], float]:
    return lambda launch: run(launch, np.random.default_rng(size), size)


def _draw(launch: Launcher, rng: np.random.Generator, vocab: int) -> float:
    """The share of rows that get another id than they should: without a filter, by each of min-p, top-p and top-k alone
    and by every few together, so narrow that many a best one does not stay; half of them among logits that are equal
    to others."""
    rows = np.arange(_DRAWN_ROWS)
    least = np.where(rows & 1, np.log(0.2), -1e30)
    top_p = np.where(rows & 2, rng.choice([0.5, 0.8, 1e-6], len(rows)), OFF)
    top_k = np.where(rows & 4, rng.choice([1, 3, 6, 40], len(rows)), vocab)
    logits = 2 * rng.standard_normal((len(rows), vocab), np.float32)
    logits[rows & 8 > 0] = np.round(logits[rows & 8 > 0])
    noise = rng.integers(0, 1 << 32, (len(rows), 2), np.uint32)
    wishes = packed_wishes(rng.uniform(0.3, 1.5, len(rows)), least, top_p, top_k, noise)
    drawn = draw(launch, mx.array(logits), mx.array(wishes))
    return float((np.array(drawn) != draw_reference(logits, wishes)).mean())


def _lengths(template: KernelTemplate, longest: int) -> list[tuple[int, ...]]:
    """Contexts of the rows: ragged and empty ones that one partition holds, and one that takes several. One of them
    reaches beyond the window."""
    window = template.window or 0
    if 0 < window < WHOLE_TOKENS - 16:  # one partition holds what is seen of any context
        return [(17, 0, 1, max(90, window + 7))]
    short, long = (17, 0, 1, 90), min(max(MOST_TOKENS, window) + 37, longest)
    return [short, (long, 33)] if long > MOST_TOKENS else [short]


def _read_back(launch: Launcher, template: KernelTemplate, rng: np.random.Generator) -> float:
    """Two writes of a pattern into fresh pools, each read on the host after a synchronise."""
    pools = _pools(template, rng, 8)
    expected = [float64(pool) for pool in pools]
    token, errors = new_token(), []
    for start in (BLOCK_SIZE, 3 * BLOCK_SIZE + 5):
        slots = np.arange(start, start + 21, 2)
        new = [_normal(rng, (len(slots), *pool.shape[2:]), template) for pool in pools]
        token = kv_write(launch, pools[0], pools[1], new[0], new[1], padded(slots), token)
        mx.eval(token)
        mx.synchronize()
        expected = [kv_write_reference(old, float64(n), slots) for old, n in zip(expected, new, strict=True)]
        errors += [relative_error(pool, want) for pool, want in zip(pools, expected, strict=True)]
    return max(errors)


def order_error(
    launch: Launcher, template: KernelTemplate, rng: np.random.Generator, num_kernels: int, *, chained: bool = True
) -> float:
    """write -> copy -> gather and decode over three layers, always at the same slots, in one lazy graph: each read must
    see its own step's write, and nothing but the tokens says so. Not `chained`, every kernel takes a fresh token, so
    that a device may run them in any order: what then goes wrong shows what the tokens are for."""
    layers = [_pools(template, rng, 12) for _ in range(3)]
    rows = 4
    written, copied = np.arange(1, 1 + rows), np.arange(1 + rows, 1 + 2 * rows)
    copies = padded(np.stack([written, copied, np.ones_like(written)], axis=1))
    slots, read = padded(written * BLOCK_SIZE), padded(copied * BLOCK_SIZE)
    tables, lengths = padded(np.repeat(copied[:, None], 2, axis=1)), padded(np.ones(rows))
    tokens, seen, expected = [new_token()], [], []
    for step in range(num_kernels // 4):
        keys, values = layers[step % 3]
        new = [_normal(rng, (rows, *pool.shape[2:]), template) for pool in (keys, values)]
        queries = mx.zeros((rows, 1, template.num_kv_heads * template.group, template.key_width), keys.dtype)
        taken = (lambda: tokens[-1]) if chained else new_token
        tokens.append(kv_write(launch, keys, values, new[0], new[1], slots, taken()))
        tokens.append(block_copy(launch, keys, values, copies, taken()))
        *gathered, token = kv_gather(launch, keys, values, read, rows, taken())
        tokens.append(token)
        out, token = paged_decode(launch, queries, keys, values, tables, lengths, taken(), max_context=1, scale=1.0)
        tokens.append(token)
        seen += [*gathered, out[:, 0, :: template.group]]
        expected += [new[0], new[1], new[1]]
    mx.eval(seen, tokens)
    return max(relative_error(got, float64(want)) for got, want in zip(seen, expected, strict=True))


def _rope(launch: Launcher, template: KernelTemplate, rng: np.random.Generator, dims: int, traditional: bool) -> float:
    """Queries, keys and values are views of one product, as models make them; every third slot is to be skipped. The
    scale is exact in every dtype."""
    scale = 1.25
    pools = _pools(template, rng, 8)
    before = [float64(pool) for pool in pools]
    heads = (template.num_kv_heads * template.group, template.num_kv_heads, template.num_kv_heads)
    widths = (template.key_width, template.key_width, template.value_width)
    slots = np.arange(BLOCK_SIZE, 8 * BLOCK_SIZE, 11)
    slots[::3] %= BLOCK_SIZE
    ends = np.cumsum([count * width for count, width in zip(heads, widths, strict=True)]).tolist()
    product = _normal(rng, (len(slots), ends[-1]), template)
    queries, keys, values = (
        part.reshape(len(slots), count, 1, width)
        for part, count, width in zip(mx.split(product, ends[:-1], axis=-1), heads, widths, strict=True)
    )
    turns = rng.standard_normal((len(slots), template.key_width), np.float32)
    angles = rng.uniform(-np.pi, np.pi, (len(slots), dims // 2))
    first, second = pairs(dims, traditional)
    turns[:, first], turns[:, second] = np.cos(angles), np.sin(angles)
    rotated, token = rope_write(
        launch,
        pools[0],
        pools[1],
        queries,
        keys,
        values,
        mx.array(turns),
        padded(slots),
        new_token(),
        dims=dims,
        traditional=traditional,
        scale=scale,
    )
    mx.eval(rotated, token)
    mx.synchronize()
    turned = [rotate_reference(float64(array[:, :, 0]), turns, dims, traditional, scale) for array in (queries, keys)]
    stored = (turned[1], float64(values[:, :, 0]))
    wanted = [kv_write_reference(old, new, slots) for old, new in zip(before, stored, strict=True)]
    results = zip((rotated, *pools), (turned[0][:, None], *wanted), strict=True)
    return max(relative_error(got, want) for got, want in results)


def _copy(launch: Launcher, template: KernelTemplate, rng: np.random.Generator) -> float:
    pools = _pools(template, rng, 9)
    before = [float64(pool) for pool in pools]
    copies = np.array([(3, 7, BLOCK_SIZE), (3, 8, BLOCK_SIZE // 2 - 1), (4, 1, 1), (5, 0, 4)])
    mx.eval(block_copy(launch, pools[0], pools[1], padded(copies), new_token()))
    wanted = [block_copy_reference(old, copies) for old in before]
    return max(relative_error(pool, want) for pool, want in zip(pools, wanted, strict=True))


def _gather(launch: Launcher, template: KernelTemplate, rng: np.random.Generator) -> float:
    pools = _pools(template, rng, 9)
    slots = run_slots(rng.permutation(8) + 1, 5, 90, BLOCK_SIZE)
    keys, values, _ = kv_gather(launch, pools[0], pools[1], padded(slots), len(slots), new_token())
    wanted = [kv_gather_reference(float64(pool), slots) for pool in pools]
    return max(relative_error(got, want) for got, want in zip((keys, values), wanted, strict=True))


def _decode(
    launch: Launcher, template: KernelTemplate, rng: np.random.Generator, positions: int, lengths: tuple[int, ...]
) -> float:
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    shuffled = rng.permutation(sum(counts)) + 1
    tables = np.zeros((len(lengths), max(counts) + 1), np.int32)
    for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        tables[row, :count] = shuffled[end - count : end]
    pools = _pools(template, rng, sum(counts) + 1)
    num_heads = template.num_kv_heads * template.group
    queries = _normal(rng, (len(lengths), positions, num_heads, template.key_width), template)
    sinks = _normal(rng, (num_heads,), template) if template.sinks else None
    scale, context_lens = 2 * template.key_width**-0.5, np.array(lengths)
    out, token = paged_decode(
        launch,
        queries,
        pools[0],
        pools[1],
        padded(tables),
        padded(context_lens),
        new_token(),
        max_context=max(lengths),
        scale=scale,
        window=template.window,
        sinks=sinks,
    )
    mx.eval(out, token)
    expected = paged_decode_reference(
        float64(queries),
        float64(pools[0]),
        float64(pools[1]),
        tables,
        context_lens,
        scale=scale,
        window=template.window,
        sinks=None if sinks is None else float64(sinks),
    )
    return relative_error(out, expected)


def _pools(template: KernelTemplate, rng: np.random.Generator, num_blocks: int) -> list[mx.array]:
    """A layer's K and V pool of random content, in memory: a lazy array would be made anew over what was written."""
    pools = [_normal(rng, shape, template) for shape in template.pool_shapes(num_blocks)]
    mx.eval(pools)
    return pools


def _normal(rng: np.random.Generator, shape: tuple[int, ...], template: KernelTemplate) -> mx.array:
    return mx.array(rng.standard_normal(shape, np.float32)).astype(DTYPES[template.dtype])
