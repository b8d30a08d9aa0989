"""How many Metal command buffers a decode step takes, by MLX's rule (see encoder.py). Owns the model of a step as its
encoder sees it: kernels, and arrays bound by name. Pure; runs nothing and never imports mlx."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .encoder import EncoderLimits
from .partitions import num_partitions

STOCK_PARTITION = 1024
"""Tokens of a row for each partition of MLX's attention."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One MLX operation: the arrays its kernels bind, inputs and outputs alike, as (name, elements)."""

    arrays: tuple[tuple[str, int], ...]
    kernels: int = 1


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A llama-shaped model. `bits`: of its weights, in groups of 64 with a scale and a bias; 16 is not quantised."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    width: int
    vocab: int
    bits: int = 4


def count_commits(operations: Iterable[Operation], limits: EncoderLimits) -> int:
    """Command buffers of one evaluation: those that a limit ends, and the one that ends it."""
    commits, kernels, elements = 1, 0, 0
    bound: set[str] = set()
    for operation in operations:
        kernels += operation.kernels
        for name, size in operation.arrays:
            if name not in bound:
                bound.add(name)
                elements += size
        if kernels > limits.max_ops or elements >> 20 > limits.max_mb:
            commits, kernels, elements = commits + 1, 0, 0
            bound.clear()
    return commits


def paged_step(shape: ModelShape, rows: int, context: int, pool_tokens: int) -> Iterator[Operation]:
    """Our decode step: K and V of `rows` tokens into pools of `pool_tokens` tokens a layer, by the kernel that rotates
    queries and keys, and attention over them."""
    for layer in range(shape.layers):
        pools = tuple((f"{layer}.{name}_pool", pool_tokens * shape.kv_heads * shape.width) for name in "kv")
        yield from _projections(shape, layer, rows)
        rotated = (f"{layer}.q.rotated", rows * shape.heads * shape.width)
        given = (*_projected(shape, layer, rows), ("rotations", rows * shape.width), ("slots", rows))
        yield Operation((*pools, *given, rotated, (f"{layer}.token", 8)))
        yield from _attention(shape, layer, rows, num_partitions(rows, shape.kv_heads, context), pools)
        yield from _rest_of_layer(shape, layer, rows)
    yield from _head(shape, rows)


def stock_step(shape: ModelShape, rows: int, context: int) -> Iterator[Operation]:
    """mlx-lm's decode step over its own caches, which grow by 256 tokens."""
    for layer in range(shape.layers):
        cache_len = -(-context // 256) * 256
        caches = tuple((f"{layer}.{name}_cache", rows * cache_len * shape.kv_heads * shape.width) for name in "kv")
        yield from _projections(shape, layer, rows)
        projected = _projected(shape, layer, rows)
        for array in projected[:2]:
            yield Operation((array, ("positions", rows)))
        for cache, new in zip(caches, projected[1:], strict=True):
            yield Operation((cache, new))
        yield from _attention(shape, layer, rows, -(-context // STOCK_PARTITION), caches)
        yield from _rest_of_layer(shape, layer, rows)
    yield from _head(shape, rows)


def _projections(shape: ModelShape, layer: int, rows: int) -> Iterator[Operation]:
    queries, keys = shape.heads * shape.width, shape.kv_heads * shape.width
    yield _norm(shape, f"{layer}.norm1", rows)
    for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
        yield _linear(shape, f"{layer}.{name}", shape.hidden, outputs, rows)


def _projected(shape: ModelShape, layer: int, rows: int) -> tuple[tuple[str, int], ...]:
    """Queries, keys and values of the step."""
    heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
    return tuple((f"{layer}.{name}.out", rows * count * shape.width) for name, count in heads.items())


def _attention(
    shape: ModelShape, layer: int, rows: int, partitions: int, stored: tuple[tuple[str, int], ...]
) -> Iterator[Operation]:
    out = (f"{layer}.attended", rows * shape.heads * shape.width)
    yield Operation((*stored, (f"{layer}.q.out", out[1]), out, ("tables", rows), (f"{layer}.token", 8)))
    if partitions > 1:  # a second kernel merges them
        yield Operation(((f"{layer}.parts", out[1] * partitions), out))


def _rest_of_layer(shape: ModelShape, layer: int, rows: int) -> Iterator[Operation]:
    residual = Operation(((f"{layer}.residual", rows * shape.hidden),))
    yield _linear(shape, f"{layer}.o", shape.heads * shape.width, shape.hidden, rows)
    yield residual
    yield _norm(shape, f"{layer}.norm2", rows)
    yield _linear(shape, f"{layer}.gate", shape.hidden, shape.intermediate, rows)
    yield _linear(shape, f"{layer}.up", shape.hidden, shape.intermediate, rows)
    yield Operation(((f"{layer}.gate.out", rows * shape.intermediate), (f"{layer}.up.out", rows * shape.intermediate)))
    yield _linear(shape, f"{layer}.down", shape.intermediate, shape.hidden, rows)
    yield residual


def _head(shape: ModelShape, rows: int) -> Iterator[Operation]:
    """Final norm, logits and a greedy choice."""
    yield _norm(shape, "norm", rows)
    yield _linear(shape, "head", shape.hidden, shape.vocab, rows)
    yield Operation((("head.out", rows * shape.vocab), ("ids", rows)))


def _norm(shape: ModelShape, name: str, rows: int) -> Operation:
    return Operation(((name, shape.hidden), (f"{name}.out", rows * shape.hidden)))


def _linear(shape: ModelShape, name: str, inputs: int, outputs: int, rows: int) -> Operation:
    weights: tuple[tuple[str, int], ...] = ((name, inputs * outputs),)
    if shape.bits < 16:  # packed into uint32, so that 4 bits count an eighth of an element
        groups = inputs * outputs // 64
        weights = ((name, inputs * outputs * shape.bits // 32), (f"{name}.scales", groups), (f"{name}.biases", groups))
    return Operation((*weights, (f"{name}.out", rows * outputs)))
