"""What every KV pool does, whatever its arrays and operations. Owns the contract and the question a layer asks; the
pools are plainpool.py (MLX operations, anywhere) and kernelpool.py (our kernels, on a GPU)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from ..sched.requests import BlockCopy
from .kvspec import KVSpec

if TYPE_CHECKING:
    from .attention import AttentionStep


@dataclass(frozen=True, slots=True)
class Asked:
    """How one layer wants to attend: scores times `scale`, to the last `window` tokens (None: all), with an extra
    logit per query head where `sinks` [heads] is given."""

    scale: float
    window: int | None = None
    sinks: mx.array | None = None


class KVPool(Protocol):
    """Per layer one array of keys and one of values, [blocks, 16, heads, width]; block 0 is the null block.

    The pool owns its arrays and states the order of reads and writes: within a step, copies come first, then each
    layer writes before it reads; across steps a write follows every earlier read. Nobody else holds an array of it.
    """

    spec: KVSpec
    num_blocks: tuple[int, ...]

    @property
    def nbytes(self) -> int: ...

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the leading slots of blocks onto others, in every layer of their group."""

    def write(self, layer: int, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        """Store keys [T, heads, k_width] and values [T, heads, v_width] at `slots` (int32 [T])."""

    def decode(self, layer: int, step: AttentionStep, queries: mx.array, asked: Asked) -> mx.array:
        """Attention of the step's decode entries, queries [B, heads, 1, k_width], each over its row's context."""

    def prefill(
        self, layer: int, step: AttentionStep, queries: mx.array, new: tuple[mx.array, mx.array], asked: Asked
    ) -> list[mx.array]:
        """Attention of the step's chunks, in order, each over its row up to each query. `queries`, and the `new` keys
        and values just written, are those of the whole step, [T, heads, 1, width]: a chunk that begins its row finds
        all it attends to among them."""

    def pending(self) -> list[mx.array]:
        """What a step must evaluate so that all its writes happen."""

    def renew(self) -> None:
        """Take fresh arrays of the same size, for when these can no longer be trusted; they are given up first."""

    def resize(self, num_blocks: Sequence[int]) -> None:
        """Hold `num_blocks` blocks per group; what fits is kept. No step may be in flight. Layer by layer, so that no
        more than one layer is held twice. When the device raises, `num_blocks` stays at what every layer holds."""


def finite(values: mx.array) -> mx.array:
    """`values`, with 0 for what overflowed. A value that is masked has the weight 0, and 0 times NaN is NaN: what one
    request's overflow left in a block would spoil whoever holds the block next."""
    return mx.where(mx.abs(values) < math.inf, values, 0)  # NaN is less than nothing


def resized(array: mx.array, num_blocks: int) -> mx.array:
    """A row-contiguous copy of a pool array [blocks, ...] with `num_blocks` blocks, evaluated; new ones are zero."""
    if num_blocks > len(array):
        larger = mx.zeros((num_blocks, *array.shape[1:]), array.dtype)
        larger[: len(array)] = array
    else:
        larger = mx.contiguous(array[:num_blocks] + mx.zeros((), array.dtype))  # a bare slice would keep the old one
    mx.eval(larger)
    return larger


def chunk_attention(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str, asked: Asked
) -> mx.array:
    """queries [length, heads, 1, width] over keys and values [1, heads, S, width], the last query aligned with the last
    key: [length, heads, 1, v_width]. Stock fused attention, so Apple's own prefill kernels serve it."""
    attended = mx.fast.scaled_dot_product_attention(
        queries.transpose(2, 1, 0, 3),  # [1, heads, length, width]
        keys,
        values,
        scale=asked.scale,
        mask=mask,
        sinks=asked.sinks,
    )
    return attended.transpose(2, 1, 0, 3)


def fused_attention(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, asked: Asked) -> mx.array:
    """queries [B, heads, 1, width] over a padded batch of keys and values [B, kv heads, S, width]."""
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=asked.scale, mask=mask, sinks=asked.sinks)
