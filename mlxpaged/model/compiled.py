"""Steps that only decode, as compiled graphs. Building a model's graph in Python costs a small model more than running
it; a compiled one is replayed. Owns the graphs; used with the kernel pool, never with chunks.

A graph serves every step of one shape: rows in a bucket, tables in a bucket, contexts up to the same whole partition.
Rows added to fill a bucket are empty: they write to the null block and attend to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..config import BLOCK_SIZE
from ..kernels.launch import SMALLEST_DEVICE_INPUT
from ..kernels.paged_decode import PARTITION
from .attention import AttentionStep
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
        if added:
            ids = mx.pad(ids, (0, added))
        graph = self._graphs.pop(key, None) or compile_graph(self._tracer(key))
        self._graphs[key] = graph  # the last one used comes last
        if len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        logits, self._pool.token = graph(self._pool.token, ids, mx.array(_sent(inputs, key)))
        return logits[: inputs.num_decode]

    def _tracer(self, key: Key) -> Callable[..., tuple[mx.array, mx.array]]:
        rows, shapes = key

        def trace(token: mx.array, ids: mx.array, sent: mx.array) -> tuple[mx.array, mx.array]:
            offset, slots, decode = _received(sent, key)
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


def _layout(key: Key) -> list[tuple[int, ...]]:
    """Shapes of what the host sends to a step, in order: positions; per KV group slots, tables, context lengths."""
    rows, shapes = key
    most = max(rows, SMALLEST_DEVICE_INPUT)
    tables = [(max(rows, -(-SMALLEST_DEVICE_INPUT // width)), width) for width, _ in shapes]
    return [(most,), *(shape for table in tables for shape in ((most,), table, (most,)))]


def _sent(inputs: StepInputs, key: Key) -> np.ndarray:
    """All of it in one piece, int32; 0 where no row is: the null block. On CUDA a kernel that is the first to read what
    the host wrote waits for the page, some 130 us, so that every array sent for itself costs a step as much."""
    arrays = [inputs.positions]
    for slots, group in zip(inputs.slots, inputs.decode, strict=True):
        arrays += [slots, group.block_ids, group.positions + 1]
    shapes = _layout(key)
    sent, begin = np.zeros(sum(map(math.prod, shapes)), np.int32), 0
    for shape, array in zip(shapes, arrays, strict=True):
        sent[begin : begin + array.size] = array.reshape(-1)
        begin += math.prod(shape)
    return sent


def _received(sent: mx.array, key: Key) -> tuple[mx.array, list[mx.array], list[BucketRows]]:
    """Positions [rows], then slots and decode entries of each KV group."""
    rows, shapes = key
    layout = _layout(key)
    ends = accumulate(map(math.prod, layout), initial=0)
    parts = [sent[begin:end].reshape(shape) for (begin, end), shape in zip(pairwise(ends), layout, strict=True)]
    groups = [parts[at : at + 3] for at in range(1, len(parts), 3)]
    decode = [BucketRows(tables, lens, context) for (_, tables, lens), (_, context) in zip(groups, shapes, strict=True)]
    return parts[0][:rows], [slots for slots, _, _ in groups], decode
