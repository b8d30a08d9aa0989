"""Steps that only decode, as compiled graphs. Building a model's graph in Python costs a small model more than running
it; a compiled one is replayed. Owns the graphs; used with the kernel pool, never with chunks.

A graph serves every step of one shape: rows in a bucket, tables in a bucket, contexts up to the same 1024 tokens.
Rows added to fill a bucket are empty: they write to the null block and attend to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..config import BLOCK_SIZE
from ..kernels.launch import SMALLEST_DEVICE_INPUT
from ..kernels.partitions import MOST_TOKENS
from .attention import AttentionStep
from .devicetables import DeviceTables, with_changes
from .fusedstep import FusedStep
from .inputs import StepInputs
from .kernelpool import KernelPool
from .rotation import install_rotations

BUCKETS = (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows that graphs are made for."""

MOST_GRAPHS = 128
"""Those used last are kept: a conversation that grows passes through a graph for each 1024 tokens."""


Graphs = Literal["fused", "plain"]
"""Fused: one kernel rotates queries and keys and writes K and V (fusedstep.py). Plain: the model's own ropes rotate."""


@dataclass(frozen=True)
class BucketRows:
    """The decode entries of one KV group inside a graph; what kernelpool.py reads of a DecodeInputs."""

    full_tables: mx.array
    context_lens: mx.array
    max_context: int


compile_graph = mx.compile

Key = tuple[int, tuple[tuple[int, int], ...]]
"""Rows, and per KV group the width of its tables and the longest context."""


class DecodeGraphs:
    """One compiled function per shape of step. "fused" is for models that why_not_fused() lets pass."""

    def __init__(self, model: nn.Module, pool: KernelPool, kind: Graphs) -> None:
        self._model = model
        self._pool = pool
        self._step = FusedStep if kind == "fused" else AttentionStep
        if kind == "fused":
            install_rotations(model)
        self._graphs: dict[Key, Callable[..., tuple[mx.array, ...]]] = {}
        self._tables = DeviceTables()

    def serves(self, inputs: StepInputs) -> bool:
        """Whether the step has a graph: only decode entries, few enough, and attended to by kernels."""
        if len(inputs.ids) != inputs.num_decode or not 0 < inputs.num_decode <= BUCKETS[-1]:
            return False
        rows, shapes = _key(inputs)  # what tracing will ask the pool for
        return all(self._pool.use_kernel(rows, context) for _, context in shapes)

    def clear(self) -> None:
        """Forget every graph, and with them the pool's arrays: graphs and this object hold each other, so they would
        stay until Python looks for cycles."""
        self._graphs.clear()
        self._tables.reset()

    def reset(self) -> None:
        """After a failed step: nothing that hangs on it is read again."""
        self._tables.reset()

    def __call__(self, inputs: StepInputs, ids: mx.array) -> mx.array:
        """Logits [rows, vocabulary] of the step, whose input ids are `ids` (int32 [rows]), lazily."""
        key = rows, _ = _key(inputs)
        added = rows - inputs.num_decode
        if added:
            ids = mx.pad(ids, (0, added))
        graph = self._graphs.pop(key, None) or compile_graph(self._tracer(key))
        self._graphs[key] = graph  # the last one used comes last
        if len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        tables = _tables(inputs, key)
        changes, before = self._tables.changes(tables, _most_changes(rows))
        sent = mx.array(_sent(inputs, changes, key))
        logits, self._pool.token, *after = graph(self._pool.token, ids, sent, *before)
        self._tables.keep(tables, after)
        return logits[: inputs.num_decode]

    def _tracer(self, key: Key) -> Callable[..., tuple[mx.array, ...]]:
        rows, shapes = key

        def trace(token: mx.array, ids: mx.array, sent: mx.array, *tables: mx.array) -> tuple[mx.array, ...]:
            offset, slots, decode = _received(sent, tables, key)
            before, self._pool.token = self._pool.token, token
            step = self._step(self._pool, rows, decode, [()] * len(shapes), offset, slots)
            try:
                logits = self._model(ids[:, None], cache=step.layers())[:, 0]
                return logits, self._pool.token, *(group.full_tables for group in decode)
            finally:  # what stands in for a token while a graph is traced is none
                self._pool.token = before

        return trace


def _key(inputs: StepInputs) -> Key:
    widths = [group.block_ids.shape[1] for group in inputs.decode]
    longest = [_rounded(group.max_context, width) for group, width in zip(inputs.decode, widths, strict=True)]
    rows = next(bucket for bucket in BUCKETS if bucket >= inputs.num_decode)
    return rows, tuple(zip(widths, longest, strict=True))


def _rounded(context: int, width: int) -> int:
    """So that a graph lasts for many steps: it decides only into how many partitions rows are divided."""
    return min(-(-context // MOST_TOKENS) * MOST_TOKENS, width * BLOCK_SIZE)


def _tables(inputs: StepInputs, key: Key) -> list[np.ndarray]:
    """Block tables by KV group, with empty rows up to the bucket and to what a kernel takes."""
    rows, _ = key
    tables = []
    for group in inputs.decode:
        width = group.block_ids.shape[1]
        table = np.zeros((max(rows, -(-SMALLEST_DEVICE_INPUT // width)), width), np.int32)
        table[: inputs.num_decode] = group.block_ids
        tables.append(table)
    return tables


def _most_changes(rows: int) -> int:
    """Each row takes a block and, behind a window, gives one back; a step whose rows are others is sent whole."""
    return max(2 * rows, SMALLEST_DEVICE_INPUT)


def _layout(key: Key) -> list[int]:
    """Elements of what the host sends to a step, in order: positions; per KV group slots, context lengths, the places
    of its table that have changed, and what they hold."""
    rows, shapes = key
    most = max(rows, SMALLEST_DEVICE_INPUT)
    return [most, *[most, most, _most_changes(rows), _most_changes(rows)] * len(shapes)]


def _sent(inputs: StepInputs, changes: Sequence[np.ndarray], key: Key) -> np.ndarray:
    """All of it in one piece; 0 where no row is: the null block. On CUDA a kernel that is the first to read what the
    host wrote waits for the page, so that arrays sent each for itself cost a step as many waits. int64, which the
    device makes int32 of: its own memory, for the host writes the next step's numbers into the same page meanwhile."""
    arrays = [inputs.positions]
    for slots, group, (places, values) in zip(inputs.slots, inputs.decode, changes, strict=True):
        arrays += [slots, group.positions + 1, places, values]
    layout = _layout(key)
    sent = np.zeros(sum(layout), np.int64)
    for begin, array in zip(accumulate(layout, initial=0), arrays, strict=False):
        sent[begin : begin + len(array)] = array
    return sent


def _received(
    sent: mx.array, tables: Sequence[mx.array], key: Key
) -> tuple[mx.array, list[mx.array], list[BucketRows]]:
    """Positions [rows], then slots and decode entries of each KV group, `tables` brought up to date."""
    rows, shapes = key
    positions, *parts = mx.split(sent.astype(mx.int32), list(accumulate(_layout(key)))[:-1])
    groups = [parts[at : at + 4] for at in range(0, len(parts), 4)]
    decode = [
        BucketRows(with_changes(table, places, values), lens, context)
        for (_, lens, places, values), table, (_, context) in zip(groups, tables, shapes, strict=True)
    ]
    return positions[:rows], [slots for slots, *_ in groups], decode
