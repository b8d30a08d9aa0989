"""The arrays that hold K and V. Owns every pool array and the order of writes to them; nothing else keeps a reference.
Knows slots and blocks as numbers, nothing of rows or requests."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..config import BLOCK_SIZE
from ..sched.requests import BlockCopy
from .kvspec import KVSpec


class KVPool:
    """Per layer one array of keys and one of values, [blocks x 16 slots, heads, width]; block 0 is never read.

    Functional writer: each write makes a new array in the graph. MLX turns that into a write in place as long as
    nothing in flight still reads the old array, which holds when every step is waited for before the next is launched.
    """

    def __init__(self, spec: KVSpec, num_blocks: Sequence[int]) -> None:
        self.spec = spec
        self.num_blocks = tuple(num_blocks)
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []
        for layer, group in zip(spec.layers, spec.group_of, strict=True):
            slots = num_blocks[group] * BLOCK_SIZE
            self._keys.append(mx.zeros((slots, layer.heads, layer.k_width), layer.dtype))
            self._values.append(mx.zeros((slots, layer.heads, layer.v_width), layer.dtype))
        mx.eval(self._keys, self._values)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """What a step must evaluate."""
        return [*self._keys, *self._values]

    def write(self, layer: int, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        """Store keys [T, heads, k_width] and values [T, heads, v_width] at `slots` (int32 [T])."""
        self._keys[layer][slots] = keys
        self._values[layer][slots] = values

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the leading slots of blocks onto others, in every layer of their group."""
        for group in {copy.group for copy in copies}:
            mine = [copy for copy in copies if copy.group == group]
            source = mx.array(np.concatenate([_slots(copy.source, copy.slots) for copy in mine]))
            target = mx.array(np.concatenate([_slots(copy.destination, copy.slots) for copy in mine]))
            for layer, index in enumerate(self.spec.group_of):
                if index == group:
                    self.write(layer, target, self._keys[layer][source], self._values[layer][source])

    def run(self, layer: int, block_ids: np.ndarray) -> tuple[mx.array, mx.array]:
        """K and V of consecutive positions: [len(block_ids) x 16, heads, width]. Neighbouring blocks are sliced."""
        return _run(self._keys[layer], block_ids), _run(self._values[layer], block_ids)

    def gather(self, layer: int, tables: mx.array) -> tuple[mx.array, mx.array]:
        """K and V of a batch of rows: `tables` int32 [B, W] -> [B, W x 16, heads, width]."""
        return _gather(self._keys[layer], tables), _gather(self._values[layer], tables)


_FEW_RUNS = 4
"""Up to so many runs of neighbouring blocks are sliced and joined; more are gathered by index."""


def _slots(block: int, count: int) -> np.ndarray:
    return np.arange(block * BLOCK_SIZE, block * BLOCK_SIZE + count, dtype=np.int32)


def _run(pool: mx.array, block_ids: np.ndarray) -> mx.array:
    cuts = np.flatnonzero(np.diff(block_ids) != 1) + 1
    if len(cuts) >= _FEW_RUNS:
        blocks = pool.reshape(-1, BLOCK_SIZE, *pool.shape[1:])
        return blocks[mx.array(block_ids)].reshape(-1, *pool.shape[1:])
    runs = [
        pool[int(run[0]) * BLOCK_SIZE : (int(run[-1]) + 1) * BLOCK_SIZE]
        for run in np.split(block_ids, cuts)
        if len(run)
    ]
    return runs[0] if len(runs) == 1 else mx.concatenate(runs)


def _gather(pool: mx.array, tables: mx.array) -> mx.array:
    blocks = pool.reshape(-1, BLOCK_SIZE, *pool.shape[1:])
    return blocks[tables].reshape(tables.shape[0], -1, *pool.shape[1:])
