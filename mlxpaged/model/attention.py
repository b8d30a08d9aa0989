"""What stands in for mlx-lm's caches during one step. Owns the per-layer objects and what they share; the pool does the
reading and writing, the inputs belong to the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..kernels.launch import padded
from .chunkbatch import ChunkBatch
from .inputs import ChunkInputs, StepInputs
from .kvpool import Asked, KVPool
from .seam import KVHandle, Window


class AttentionStep:
    """What all layers of one step share: device copies of slots and offsets, and the masks, each made once."""

    def __init__(
        self,
        pool: KVPool,
        num_decode: int,
        decode: Sequence[Any],
        chunks: Sequence[tuple[ChunkInputs, ...]],
        offset: mx.array,
        slots: Sequence[mx.array],
    ) -> None:
        self.pool = pool
        self.num_decode = num_decode
        self.decode = decode  # per KV group
        self.chunks = chunks  # per KV group
        self.offset = offset  # int32 [T]
        self.slots = slots  # per KV group, int32 [>= T]
        self._masks: dict[Any, mx.array] = {}
        self._batches: dict[int, ChunkBatch] = {}

    @classmethod
    def of(cls, inputs: StepInputs, pool: KVPool) -> AttentionStep:
        """The step that `inputs` describe, over `pool`."""
        slots = [padded(slots) for slots in inputs.slots]
        return cls(pool, inputs.num_decode, inputs.decode, inputs.chunks, mx.array(inputs.positions), slots)

    def layers(self) -> list[PagedLayer]:
        """The `cache=` argument of the model: one object per layer."""
        return [PagedLayer(self, index, group) for index, group in enumerate(self.pool.spec.group_of)]

    def part_mask(self, group: int, part: int, window: int | None) -> mx.array:
        """decode_mask() for one part of the entries."""
        key = ("part", group, part, window)
        if key not in self._masks:
            self._masks[key] = self.decode[group].parts[part].mask(window)
        return self._masks[key]

    def part_vectors(self, group: int, part: int, heads: int) -> mx.array:
        """DecodeInputs.vectors() of one part of the entries."""
        key = ("vectors", group, part, heads)
        if key not in self._masks:
            self._masks[key] = self.decode[group].parts[part].vectors(heads)
        return self._masks[key]

    def decode_mask(self, group: int, window: int | None) -> mx.array:
        key = ("decode", group, window)
        if key not in self._masks:
            self._masks[key] = self.decode[group].mask(window)
        return self._masks[key]

    def chunk_batch(self, group: int, chunks: Sequence[ChunkInputs], unit: int | None) -> ChunkBatch:
        """ChunkBatch.of() the group's long `chunks`, once for all its layers."""
        if group not in self._batches:
            self._batches[group] = ChunkBatch.of(chunks, self.offset.size, unit)
        return self._batches[group]

    def chunk_mask(self, chunk: ChunkInputs, window: int | None) -> mx.array | str:
        """The mask over a chunk's positions: "causal" is aligned to the lower right corner."""
        if window is None or chunk.kv_len <= window:
            return "causal"
        key = (chunk.entry, chunk.first, chunk.length, window)
        if key not in self._masks:
            places = mx.arange(chunk.first, chunk.first + chunk.kv_len)[None]
            queries = mx.arange(chunk.start, chunk.start + chunk.length)[:, None]
            self._masks[key] = (places <= queries) & (places > queries - window)
        return self._masks[key]


class PagedLayer:
    """One layer's stand-in for an mlx-lm cache, for one step: T batch rows of one token, each with its own offset."""

    def __init__(self, step: AttentionStep, index: int, group: int) -> None:
        self._step = step
        self._index = index
        self._group = group
        self._window = step.pool.spec.layers[index].window
        self._new: tuple[mx.array, mx.array]
        self.offset = step.offset  # int32 [T]: rope and position scaling work per row

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle]:
        """Store K and V [T, heads, 1, width] of the step's tokens; the handles stand for everything stored so far."""
        self._step.pool.write(self._index, self._step.slots[self._group], keys.squeeze(2), values.squeeze(2))
        self._new = keys, values
        return KVHandle(self, keys), KVHandle(self, values)

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> Window | None:
        return Window.asked(return_array, window_size)

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """queries [T, heads, 1, k_width] -> [T, heads, 1, v_width]: each token over its row's context."""
        asked = self._asked(scale, mask, sinks)
        step, count = self._step, self._step.num_decode
        if not step.chunks[self._group]:
            return step.pool.decode(self._index, step, queries, asked)
        decoded = [step.pool.decode(self._index, step, queries[:count], asked)] if count else []
        outputs = decoded + step.pool.prefill(self._index, step, queries, self._new, asked)
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _asked(self, scale: float, mask: Any, sinks: mx.array | None) -> Asked:
        if mask is not None and not isinstance(mask, Window):
            raise TypeError("the model built its own mask")
        windows = [size for size in (self._window, mask.size if mask else None) if size is not None]
        return Asked(scale, min(windows) if windows else None, sinks)
