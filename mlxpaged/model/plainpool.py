"""The KV pool on plain MLX operations: scatter, gather, fused attention. The CPU's path and every GPU's fall-back. Owns
its arrays; nothing else keeps a reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..config import BLOCK_SIZE
from ..sched.requests import BlockCopy
from .kvpool import Asked, chunk_attention, finite, fused_attention, resized
from .kvspec import KVSpec

if TYPE_CHECKING:
    from .attention import AttentionStep

HIDDEN = -1e30
"""A score that takes no weight; finite, so that a row that sees nothing gives no NaN."""

_FEW_RUNS = 4
"""Up to so many runs of neighbouring blocks are sliced and joined; more are gathered by index."""


class PlainPool:
    """Each write makes a new array in the graph. MLX turns that into a write in place as long as nothing in flight
    still reads the old array, which holds when every step is waited for before the next is launched."""

    def __init__(self, spec: KVSpec, num_blocks: Sequence[int]) -> None:
        self.spec = spec
        self.num_blocks = tuple(num_blocks)
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []
        self._by_products = mx.default_device().type == mx.DeviceType.cpu
        self.renew()

    def renew(self) -> None:
        self._keys.clear()
        self._values.clear()
        for layer, group in zip(self.spec.layers, self.spec.group_of, strict=True):
            shape = (self.num_blocks[group], BLOCK_SIZE, layer.heads)
            self._keys.append(mx.zeros((*shape, layer.k_width), layer.dtype))
            self._values.append(mx.zeros((*shape, layer.v_width), layer.dtype))
        mx.eval(self._keys, self._values)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.pending())

    def pending(self) -> list[mx.array]:
        return [*self._keys, *self._values]

    def resize(self, num_blocks: Sequence[int]) -> None:
        wanted = tuple(num_blocks)
        self.num_blocks = tuple(map(min, self.num_blocks, wanted))
        for layer, group in enumerate(self.spec.group_of):
            if len(self._keys[layer]) != wanted[group]:
                self._keys[layer] = resized(self._keys[layer], wanted[group])
                self._values[layer] = resized(self._values[layer], wanted[group])
                mx.clear_cache()  # the old arrays, which nothing else will ever fit
        self.num_blocks = wanted

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for group in {copy.group for copy in copies}:
            mine = [copy for copy in copies if copy.group == group]
            source = np.concatenate([_slots(copy.source, copy.slots) for copy in mine])
            target = np.concatenate([_slots(copy.destination, copy.slots) for copy in mine])
            blocks, offsets = mx.array(source // BLOCK_SIZE), mx.array(source % BLOCK_SIZE)
            for layer, index in enumerate(self.spec.group_of):
                if index == group:
                    keys, values = self._keys[layer][blocks, offsets], self._values[layer][blocks, offsets]
                    self.write(layer, mx.array(target), keys, values)

    def write(self, layer: int, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        slots = slots[: len(keys)]  # kernels want them padded
        blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        self._keys[layer][blocks, offsets] = keys
        self._values[layer][blocks, offsets] = finite(values)

    def decode(self, layer: int, step: AttentionStep, queries: mx.array, asked: Asked) -> mx.array:
        group, start, outputs = self.spec.group_of[layer], 0, []
        for index, part in enumerate(step.decode[group].parts):
            vectors = step.part_vectors(group, index, self.spec.layers[layer].heads)
            keys, values = (
                pool.reshape(-1, pool.shape[-1])[vectors] for pool in (self._keys[layer], self._values[layer])
            )
            mine = queries[start : start + len(part.positions)]
            outputs.append(self._attend(mine, keys, values, step.part_mask(group, index, asked.window), asked))
            start += len(part.positions)
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _attend(self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, asked: Asked) -> mx.array:
        """queries [B, heads, 1, width] over keys and values [B, kv heads, S, width]."""
        if not self._by_products or asked.sinks is not None:
            return fused_attention(queries, keys, values, mask, asked)
        # On a CPU nothing is fused, and a third of the time goes into repeating K and V for the heads that share them.
        grouped = (queries * asked.scale).reshape(*keys.shape[:2], -1, keys.shape[-1])
        scores = mx.where(mask, grouped @ keys.swapaxes(-1, -2), HIDDEN)
        return (mx.softmax(scores, axis=-1, precise=True) @ values).reshape(*queries.shape[:-1], values.shape[-1])

    def prefill(
        self, layer: int, step: AttentionStep, queries: mx.array, new: tuple[mx.array, mx.array], asked: Asked
    ) -> list[mx.array]:
        outputs = []
        for chunk in step.chunks[self.spec.group_of[layer]]:
            mine = slice(chunk.entry, chunk.entry + chunk.length)
            if chunk.begins_row:
                runs = [fresh[mine, :, 0] for fresh in new]
            else:
                runs = [_run(pool[layer], chunk.block_ids)[: chunk.kv_len] for pool in (self._keys, self._values)]
            # Heads first and contiguous: the CPU's SDPA is 2 to 4 times slower over transposed K and V.
            keys, values = (mx.contiguous(run.transpose(1, 0, 2))[None] for run in runs)
            mask = step.chunk_mask(chunk, asked.window)
            outputs.append(chunk_attention(queries[mine], keys, values, mask, asked))
        return outputs


def _slots(block: int, count: int) -> np.ndarray:
    return np.arange(block * BLOCK_SIZE, block * BLOCK_SIZE + count, dtype=np.int32)


def _run(pool: mx.array, block_ids: np.ndarray) -> mx.array:
    """Consecutive positions [len(block_ids) x 16, heads, width]; neighbouring blocks are sliced, not gathered."""
    cuts = np.flatnonzero(np.diff(block_ids) != 1) + 1
    if len(cuts) >= _FEW_RUNS:
        return pool[mx.array(block_ids)].reshape(-1, *pool.shape[2:])
    runs = [pool[int(run[0]) : int(run[-1]) + 1] for run in np.split(block_ids, cuts)]
    joined = runs[0] if len(runs) == 1 else mx.concatenate(runs)
    return joined.reshape(-1, *pool.shape[2:])
