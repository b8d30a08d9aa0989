"""One step's inputs, gathered from the plan and the state table. Pure numpy until the end; owns nothing that outlives
the step and never writes the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import mlx.core as mx
import numpy as np

from ..config import BLOCK_SIZE
from ..kernels.launch import padded
from ..sched.allocator import GroupSpec
from ..sched.requests import Chunk, StepPlan
from ..sched.table import RequestTable, blocks_for

_PART_BLOCKS = 16
"""A batch is cut where that saves reading more than so many blocks: about what the operations of one more part cost."""


@dataclass(frozen=True)
class ChunkInputs:
    """One chunk in one KV group: its entries are `[entry, entry + length)` of the step's tokens, its K and V lie in
    `block_ids`, whose first slot is position `first`; the chunk's first query is at position `start`."""

    entry: int
    length: int
    start: int
    first: int
    block_ids: np.ndarray  # int32
    table: np.ndarray  # int32: the row's table from position 0

    @property
    def begins_row(self) -> bool:
        """Whether its keys are its own tokens', and no others."""
        return self.start == 0

    @property
    def kv_len(self) -> int:
        """Positions from `first` to the chunk's last query, itself included."""
        return self.start + self.length - self.first

    @cached_property
    def full_table(self) -> mx.array:
        return padded(self.table[None])

    @cached_property
    def context_len(self) -> mx.array:
        return padded(np.array([self.start + self.length], np.int32))


@dataclass(frozen=True)
class DecodeInputs:
    """The decode entries in one KV group, B rows: `tables` int32 [B, W] start at each row's first readable block,
    whose first slot is position `firsts`; `positions` int32 [B] are the queries'."""

    tables: np.ndarray
    counts: np.ndarray  # int32 [B]: how many blocks of its table each row may read
    firsts: np.ndarray
    positions: np.ndarray
    block_ids: np.ndarray  # int32 [B, wider]: the same tables from position 0

    @property
    def max_context(self) -> int:
        """The longest row's context, its query included."""
        return int(self.positions.max(initial=0)) + 1

    @property
    def num_slots(self) -> int:
        return self.tables.size * BLOCK_SIZE

    @cached_property
    def device_slots(self) -> mx.array:
        """The slots behind `tables`, row after row: int32 [B x W x 16]."""
        return padded((self.tables[..., None] * BLOCK_SIZE + np.arange(BLOCK_SIZE, dtype=np.int32)).reshape(-1))

    @cached_property
    def full_tables(self) -> mx.array:
        return padded(self.block_ids)

    @cached_property
    def context_lens(self) -> mx.array:
        return padded(self.positions + 1)

    def vectors(self, heads: int) -> mx.array:
        """int32 [B, heads, W x 16]: where each head's vectors lie in a pool seen as [blocks x 16 x heads, width]."""
        slots = (self.tables[..., None] * BLOCK_SIZE + np.arange(BLOCK_SIZE, dtype=np.int32)).reshape(
            len(self.tables), -1
        )
        return mx.array(slots[:, None] * heads + np.arange(heads, dtype=np.int32)[:, None])

    @cached_property
    def parts(self) -> tuple[DecodeInputs, ...]:
        """The entries in runs of like length, in order: what a padded batch reads in vain is bounded."""
        cuts, widest = [0], int(self.counts[0]) if len(self.counts) else 0
        for place, count in enumerate(self.counts.tolist()):
            saved = (widest - count) * (len(self.counts) - place)
            if saved > _PART_BLOCKS:
                cuts.append(place)
                widest = count
            widest = max(widest, count)
        return tuple(self._part(start, stop) for start, stop in pairwise([*cuts, len(self.counts)]))

    def _part(self, start: int, stop: int) -> DecodeInputs:
        counts = self.counts[start:stop]
        tables = self.tables[start:stop, : int(counts.max(initial=0))]
        mine = slice(start, stop)
        return DecodeInputs(tables, counts, self.firsts[mine], self.positions[mine], self.block_ids[mine])

    def mask(self, window: int | None) -> mx.array:
        """bool [B, 1, 1, W x 16]: which gathered slots each query may read."""
        places = self.firsts[:, None] + np.arange(self.tables.shape[1] * BLOCK_SIZE, dtype=np.int32)
        visible = places <= self.positions[:, None]
        if window is not None:
            visible &= places > self.positions[:, None] - window
        return mx.array(visible[:, None, None, :])


@dataclass(frozen=True)
class StepInputs:
    """T tokens: the plan's decode entries first, then its chunks, each token a batch row of its own.

    `ids` and `positions` are int32 [T]; `slots[g]` int32 [T]; `decode[g]` and `chunks[g]` describe attention in KV
    group g. `device_entries` are the decode entries whose id is still only in the device's `last_tokens`.
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: tuple[np.ndarray, ...]
    decode: tuple[DecodeInputs, ...]
    chunks: tuple[tuple[ChunkInputs, ...], ...]
    device_entries: np.ndarray
    decode_rows: np.ndarray

    @property
    def num_decode(self) -> int:
        return len(self.decode_rows)


def gather_inputs(plan: StepPlan, table: RequestTable, groups: Sequence[GroupSpec]) -> StepInputs:
    """The inputs of `plan`. The table is only read, and only here: later changes to it cannot reach the step."""
    rows = np.concatenate([plan.decode_rows, *(np.full(chunk.length, chunk.row, np.int32) for chunk in plan.chunks)])
    positions = np.concatenate(
        [plan.decode_positions, *(np.arange(c.start, c.start + c.length, dtype=np.int32) for c in plan.chunks)]
    ).astype(np.int32)
    ids = table.token_ids[rows, positions]
    ids[: len(plan.decode_rows)][plan.from_device] = 0
    slots = tuple(
        table.block_ids[group][rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        for group in range(len(groups))
    )
    return StepInputs(
        ids=ids,
        positions=positions,
        slots=slots,
        decode=tuple(_decode(plan, table.block_ids[index], spec) for index, spec in enumerate(groups)),
        chunks=tuple(_chunks(plan, table.block_ids[index], spec) for index, spec in enumerate(groups)),
        device_entries=np.flatnonzero(plan.from_device).astype(np.int32),
        decode_rows=plan.decode_rows,
    )


def _decode(plan: StepPlan, block_ids: np.ndarray, spec: GroupSpec) -> DecodeInputs:
    positions = plan.decode_positions
    ends = positions // BLOCK_SIZE + 1
    starts = np.zeros_like(ends)
    if spec.window is not None:
        starts = np.maximum(positions - spec.window + 1, 0) // BLOCK_SIZE
    width = int((ends - starts).max(initial=0))
    places = np.minimum(starts[:, None] + np.arange(width, dtype=np.int32), block_ids.shape[1] - 1)
    tables = np.where(
        starts[:, None] + np.arange(width) < ends[:, None], block_ids[plan.decode_rows[:, None], places], 0
    )
    used = _bucket(int(ends.max(initial=1)), block_ids.shape[1])
    full = block_ids[plan.decode_rows, :used]
    return DecodeInputs(tables.astype(np.int32), ends - starts, (starts * BLOCK_SIZE).astype(np.int32), positions, full)


def _bucket(width: int, most: int) -> int:
    """A power of two, so that few shapes of a table exist."""
    return min(1 << max(width - 1, 0).bit_length(), most)


def _chunks(plan: StepPlan, block_ids: np.ndarray, spec: GroupSpec) -> tuple[ChunkInputs, ...]:
    entry, found = len(plan.decode_rows), []
    for chunk in plan.chunks:
        found.append(_chunk(chunk, entry, block_ids, spec))
        entry += chunk.length
    return tuple(found)


def _chunk(chunk: Chunk, entry: int, block_ids: np.ndarray, spec: GroupSpec) -> ChunkInputs:
    first, last = spec.first_needed(chunk.start), blocks_for(chunk.start + chunk.length)
    table = block_ids[chunk.row, : _bucket(last, block_ids.shape[1])].copy()
    return ChunkInputs(entry, chunk.length, chunk.start, first * BLOCK_SIZE, table[first:last], table)
