"""Compiled decode graphs as objects: what they keep, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpaged.model import compiled
from mlxpaged.model.compiled import DecodeGraphs
from mlxpaged.model.inputs import DecodeInputs, StepInputs

MIB = 2**20


class Pool:
    """What a graph asks of a pool; its array is read inside the graph, as the kernels read theirs."""

    spec = SimpleNamespace(group_of=(0,), layers=(SimpleNamespace(window=None),))

    def __init__(self) -> None:
        self.token = mx.zeros((8,), mx.uint32)
        self.keys = mx.zeros((64 * MIB // 4,))
        mx.eval(self.keys)

    def use_kernel(self, rows: int, context: int) -> bool:
        return True


def step(context: int = 1) -> StepInputs:
    """One row that decodes behind `context - 1` positions."""
    one, blocks = np.zeros(1, np.int32), 1 << (-(-context // 16) - 1).bit_length()
    table = np.ones((1, blocks), np.int32)
    decode = DecodeInputs(table, one + blocks, one, one + context - 1, table)
    return StepInputs(one, one + context - 1, (one,), (decode,), ((),), one[:0], one)


def graphs_over(pool: Any) -> DecodeGraphs:
    def model(ids: mx.array, cache: Any = None) -> mx.array:
        pool.token = pool.token + 1
        return ids[:, :, None].astype(mx.float32) + pool.keys[:7]

    return DecodeGraphs(model, pool, "plain")  # type: ignore[arg-type]


def test_cleared_graphs_hold_no_array_of_the_pool() -> None:
    before = mx.get_active_memory()
    pool = Pool()
    graphs = graphs_over(pool)
    mx.eval(graphs(step(), mx.zeros((1,), mx.int32)))
    assert mx.get_active_memory() - before >= 64 * MIB
    pool.keys = mx.zeros((7,))
    graphs.clear()
    assert mx.get_active_memory() - before < MIB


def test_the_graphs_used_last_are_kept(monkeypatch) -> None:
    made: list[int] = []

    def compiling(function: Any) -> Any:
        made.append(len(made))
        return mx.compile(function)

    monkeypatch.setattr(compiled, "compile_graph", compiling)
    monkeypatch.setattr(compiled, "MOST_GRAPHS", 2)
    graphs = graphs_over(Pool())

    def run(context: int) -> int:
        mx.eval(graphs(step(context), mx.zeros((1,), mx.int32)))
        return len(made)

    assert [run(context) for context in (1, 100, 1, 2000, 1, 100)] == [1, 2, 2, 3, 3, 4]
