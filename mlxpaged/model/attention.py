"""Paged attention on plain MLX operations: gather, then mx.fast.scaled_dot_product_attention. Owns the per-layer
objects that stand in for mlx-lm's caches during one step; the pool and the inputs belong to others."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .inputs import ChunkInputs, StepInputs
from .kvpool import KVPool
from .seam import KVHandle, Window


class AttentionStep:
    """What all layers of one step share: device copies of slots and offsets, and the masks, each made once."""

    def __init__(self, inputs: StepInputs, pool: KVPool) -> None:
        self.inputs = inputs
        self.pool = pool
        self.offset = mx.array(inputs.positions)
        self.slots = [mx.array(slots) for slots in inputs.slots]
        self._masks: dict[Any, mx.array] = {}

    def layers(self) -> list[PagedLayer]:
        """The `cache=` argument of the model: one object per layer."""
        return [PagedLayer(self, index, group) for index, group in enumerate(self.pool.spec.group_of)]

    def decode_mask(self, group: int, window: int | None) -> mx.array:
        key = ("decode", group, window)
        if key not in self._masks:
            self._masks[key] = self.inputs.decode[group].mask(window)
        return self._masks[key]

    def chunk_mask(self, chunk: ChunkInputs, window: int | None) -> mx.array | str:
        """The mask over positions `first` .. the chunk's last: "causal" is aligned to the lower right corner."""
        if window is None or chunk.kv_len <= window:
            return "causal"
        key = (chunk.entry, chunk.first, window)
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
        self.offset = step.offset  # int32 [T]: rope and position scaling work per row

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle]:
        """Store K and V [T, heads, 1, width] of the step's tokens; the handles stand for everything stored so far."""
        self._step.pool.write(self._index, self._step.slots[self._group], keys[:, :, 0], values[:, :, 0])
        return KVHandle(self, keys), KVHandle(self, values)

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> Window | None:
        return Window.asked(return_array, window_size)

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """queries [T, heads, 1, k_width] -> [T, heads, 1, v_width]: each token over its row's context."""
        if mask is not None and not isinstance(mask, Window):
            raise TypeError("the model built its own mask")
        windows = [size for size in (self._window, mask.size if mask else None) if size is not None]
        window = min(windows) if windows else None
        outputs = []
        if count := self._step.inputs.num_decode:
            outputs.append(self._decode(queries[:count], scale, window, sinks))
        for chunk in self._step.inputs.chunks[self._group]:
            outputs.append(
                self._prefill(queries[chunk.entry : chunk.entry + chunk.length], chunk, scale, window, sinks)
            )
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _decode(self, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None) -> mx.array:
        step = self._step
        keys, values = step.pool.gather(self._index, step.inputs.decode[self._group].device_tables)
        # Contiguous first: the CPU's SDPA is 2 to 4 times slower over transposed K and V.
        return mx.fast.scaled_dot_product_attention(
            queries,
            mx.contiguous(keys.transpose(0, 2, 1, 3)),
            mx.contiguous(values.transpose(0, 2, 1, 3)),
            scale=scale,
            mask=step.decode_mask(self._group, window),
            sinks=sinks,
        )

    def _prefill(
        self, queries: mx.array, chunk: ChunkInputs, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        keys, values = self._step.pool.run(self._index, chunk.block_ids)
        keys, values = keys[: chunk.kv_len], values[: chunk.kv_len]
        attended = mx.fast.scaled_dot_product_attention(
            queries.transpose(2, 1, 0, 3),  # [1, heads, length, width]
            mx.contiguous(keys.transpose(1, 0, 2))[None],
            mx.contiguous(values.transpose(1, 0, 2))[None],
            scale=scale,
            mask=self._step.chunk_mask(chunk, window),
            sinks=sinks,
        )
        return attended.transpose(2, 1, 0, 3)
