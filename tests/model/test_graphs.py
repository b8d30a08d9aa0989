"""Compiled decode graphs as objects: what they keep, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.kernels.launch import KernelSpec
from mlxpaged.model import compiled
from mlxpaged.model.compiled import DecodeGraphs
from mlxpaged.model.inputs import DecodeInputs, StepInputs
from mlxpaged.model.kernelpool import KernelPool
from mlxpaged.model.kvspec import probe
from mlxpaged.model.seam import attention_hook

from .families import tiny_model

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


def step(context: int = 1, groups: int = 1) -> StepInputs:
    """One row that decodes behind `context - 1` positions, in as many KV groups."""
    one, blocks = np.zeros(1, np.int32), 1 << (-(-context // 16) - 1).bit_length()
    table = np.ones((1, blocks), np.int32)
    decode = DecodeInputs(table, one + blocks, one, one + context - 1, table)
    return StepInputs(one, one + context - 1, (one,) * groups, (decode,) * groups, ((),) * groups, one[:0], one)


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


def of_its_inputs(
    spec: KernelSpec, inputs: Sequence[mx.array], *, shapes: Any, dtypes: Any, **_: Any
) -> list[mx.array]:
    """A launcher of MLX operations, which a graph can hold: an output of each kernel that tells its inputs."""
    given = dict(zip(spec.input_names, inputs, strict=True))
    first = given["queries"].reshape(shapes[0])
    if spec.name == "rope_write":
        first = first * given["rotations"][:, None, None] + given["keys"].mean() + given["slots"].sum()
    else:
        first = first + given["context_lens"].sum()
    rest = zip(shapes[1:-1], dtypes[1:-1], strict=True)
    return [first, *(mx.zeros(shape, dtype) for shape, dtype in rest), given["token"] + 1]


def test_a_replayed_fused_graph_rotates_by_the_positions_of_its_own_step(monkeypatch) -> None:
    model, _ = tiny_model("gemma3_text", rope_theta=1e6, num_hidden_layers=2)

    def logits(contexts: tuple[int, ...]) -> list[np.ndarray]:
        spec = probe(model)
        graphs = DecodeGraphs(model, KernelPool(spec, (8,) * len(spec.windows), of_its_inputs), "fused")
        with attention_hook(model):
            return [
                np.array(graphs(step(context, len(spec.windows)), mx.zeros((1,), mx.int32))) for context in contexts
            ]

    contexts = (3, 4, 16)
    replayed = logits(contexts)
    monkeypatch.setattr(compiled, "compile_graph", lambda function: function)
    for context, got, anew in zip(contexts, replayed, logits(contexts), strict=True):
        np.testing.assert_allclose(got, anew, atol=1e-4, err_msg=str(context))
    assert not np.allclose(replayed[0], replayed[1], atol=1e-2)


def test_a_trace_that_fails_leaves_the_pool_and_the_next_step_as_they_were() -> None:
    model, _ = tiny_model("llama")
    full: list[bool] = []

    def launch(spec: KernelSpec, inputs: Sequence[mx.array], **how: Any) -> list[mx.array]:
        if spec.name == "paged_decode" and not full:
            full.append(True)
            raise RuntimeError("no room")
        return of_its_inputs(spec, inputs, **how)

    pool = KernelPool(probe(model), (8,), launch)
    graphs, sound = DecodeGraphs(model, pool, "fused"), pool.token
    with attention_hook(model):
        with pytest.raises(RuntimeError, match="no room"):
            graphs(step(), mx.zeros((1,), mx.int32))
        assert pool.token is sound
        after = np.array(graphs(step(), mx.zeros((1,), mx.int32)))
        mx.eval(pool.pending())
        expected = np.array(DecodeGraphs(model, pool, "fused")(step(), mx.zeros((1,), mx.int32)))
    np.testing.assert_array_equal(after, expected)
