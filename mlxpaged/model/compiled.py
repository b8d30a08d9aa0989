"""Steps that only decode, as compiled graphs. Building a model's graph in Python costs a small model more than running
it; a compiled one is replayed. Owns the graphs; used with the kernel pool, never with chunks.

A graph serves every step of one shape: rows in a bucket, tables in a bucket, contexts up to the same whole partition.
Rows added to fill a bucket are empty: they write to the null block and attend to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..config import BLOCK_SIZE
from ..kernels.launch import SMALLEST_DEVICE_INPUT
from ..kernels.paged_decode import PARTITION
from .attention import AttentionStep
from .fusedstep import FusedStep
from .inputs import DecodeInputs, StepInputs
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
        self._graphs: dict[Key, Callable[..., tuple[mx.array, mx.array]]] = {}

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

    def __call__(self, inputs: StepInputs, ids: mx.array) -> mx.array:
        """Logits [rows, vocabulary] of the step, whose input ids are `ids` (int32 [rows]), lazily."""
        key = rows, _ = _key(inputs)
        added = rows - inputs.num_decode
        arrays = [mx.pad(ids, (0, added)) if added else ids, _filled(inputs.positions, rows)]
        arrays += [_filled(slots, max(rows, SMALLEST_DEVICE_INPUT)) for slots in inputs.slots]
        for group in inputs.decode:
            arrays += [_filled(group.block_ids, _table_rows(rows, group.block_ids.shape[1])), _lens(group, rows)]
        graph = self._graphs.pop(key, None) or compile_graph(self._tracer(key))
        self._graphs[key] = graph  # the last one used comes last
        if len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        logits, self._pool.token = graph(self._pool.token, *arrays)
        return logits[: inputs.num_decode]

    def _tracer(self, key: Key) -> Callable[..., tuple[mx.array, mx.array]]:
        rows, shapes = key

        def trace(token: mx.array, ids: mx.array, offset: mx.array, *rest: mx.array) -> tuple[mx.array, mx.array]:
            slots, tables = rest[: len(shapes)], rest[len(shapes) :]
            decode = [
                BucketRows(tables[2 * index], tables[2 * index + 1], context)
                for index, (_, context) in enumerate(shapes)
            ]
            before, self._pool.token = self._pool.token, token
            step = self._step(self._pool, rows, decode, [()] * len(shapes), offset, slots)
            try:
                logits = self._model(ids[:, None], cache=step.layers())[:, 0]
                return logits, self._pool.token
            finally:  # what stands in for a token while a graph is traced is none
                self._pool.token = before

        return trace


def _key(inputs: StepInputs) -> Key:
    widths = [group.block_ids.shape[1] for group in inputs.decode]
    contexts = [_whole_partitions(group.max_context, width) for group, width in zip(inputs.decode, widths, strict=True)]
    rows = next(bucket for bucket in BUCKETS if bucket >= inputs.num_decode)
    return rows, tuple(zip(widths, contexts, strict=True))


def _whole_partitions(context: int, width: int) -> int:
    """The longest context that takes as many partitions, so that a graph lasts for many steps."""
    return min(-(-context // PARTITION) * PARTITION, width * BLOCK_SIZE)


def _table_rows(rows: int, width: int) -> int:
    return max(rows, -(-SMALLEST_DEVICE_INPUT // width))


def _lens(group: DecodeInputs, rows: int) -> mx.array:
    return _filled(group.positions + 1, max(rows, SMALLEST_DEVICE_INPUT))


def _filled(values: np.ndarray, rows: int) -> mx.array:
    """`values` with zero rows added: empty rows, the null block."""
    filled = np.zeros((rows, *values.shape[1:]), np.int32)
    filled[: len(values)] = values
    return mx.array(filled)
