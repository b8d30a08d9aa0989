"""All long prompt chunks of one step in one KV group, laid out for prefill attention. Owns the arithmetic of padding;
pure numpy until the end, knows nothing of layers or pools.

On CUDA, fused attention plans every pair (queries, keys) of lengths once, for some 50 ms. So lengths are rounded, with
made-up queries before and after a chunk's own: those after come later, those before only look, and what either gives
is dropped. They are the step's other queries, since any will do; only at the step's ends are some added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..config import BLOCK_SIZE
from ..kernels.launch import padded
from .inputs import ChunkInputs


@dataclass(frozen=True)
class Run:
    """One chunk: `inputs` with its made-up queries, which are `[begin, begin + inputs.length)` of the widened step's;
    its own are `[front, front + length)` of those. Its keys are `[kv_begin, kv_begin + inputs.kv_len)` of the gathered
    ones; None: it begins its row, so its keys are those of the same tokens as its queries."""

    inputs: ChunkInputs
    begin: int
    front: int
    length: int
    kv_begin: int | None


@dataclass(frozen=True)
class ChunkBatch:
    """`slots` int32 [>= num_slots]: those of the keys to gather, run after run. The step's queries and new keys are to
    be widened by `before` and `after` rows."""

    runs: tuple[Run, ...]
    slots: mx.array
    num_slots: int
    before: int
    after: int

    @classmethod
    def of(cls, chunks: Sequence[ChunkInputs], num_tokens: int, unit: int | None) -> ChunkBatch:
        """Lay out `chunks` of a step of `num_tokens` tokens. `unit`: see rounded(); None rounds nothing."""
        before = after = num_slots = 0
        placed: list[tuple[ChunkInputs, ChunkInputs, int, int | None]] = []
        slots = [np.zeros(0, np.int32)]
        for chunk in chunks:
            inputs, front, behind = rounded(chunk, unit) if unit else (chunk, 0, 0)
            before = max(before, front - chunk.entry)
            after = max(after, chunk.entry + chunk.length + behind - num_tokens)
            placed.append((inputs, chunk, front, None if chunk.begins_row else num_slots))
            if not chunk.begins_row:
                slots.append(_slots(inputs))
                num_slots += inputs.kv_len
        runs = tuple(Run(inputs, before + c.entry - front, front, c.length, kv) for inputs, c, front, kv in placed)
        return cls(runs, padded(np.concatenate(slots)), num_slots, before, after)

    def widened(self, queries: mx.array) -> mx.array:
        """The step's queries [T, ...] with what the runs need beyond its ends."""
        if not self.before and not self.after:
            return queries
        return mx.pad(queries, [(self.before, self.after), *[(0, 0)] * (queries.ndim - 1)])


def rounded(chunk: ChunkInputs, unit: int) -> tuple[ChunkInputs, int, int]:
    """The same chunk with made-up queries: its kv_len a multiple of `unit`, its length half a unit times a power of two
    (or the kv_len, where that is less); and how many there are in front and behind."""
    behind = -chunk.kv_len % unit
    length, least = chunk.length + behind, max(unit // 2, 1)
    wanted = least << (-(-length // least) - 1).bit_length()
    front = min(wanted, chunk.kv_len + behind) - length
    return replace(chunk, length=length + front, start=chunk.start - front), front, behind


def _slots(chunk: ChunkInputs) -> np.ndarray:
    """int32 [kv_len]: the slots of its keys, those of the null block where no block is held."""
    slots = (chunk.block_ids[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE, dtype=np.int32)).reshape(-1)
    found = np.zeros(chunk.kv_len, np.int32)
    count = min(len(found), len(slots))
    found[:count] = slots[:count]
    return found
