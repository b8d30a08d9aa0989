"""Whether decode steps may be replayed: a true graph agrees with steps built anew, a false one is found out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.kernels.choose import AttentionPath, Device
from mlxpaged.kernels.timing import PathChoice
from mlxpaged.model import compiled, examine, serving
from mlxpaged.model.kernelpool import KernelPool
from mlxpaged.model.kvspec import probe
from mlxpaged.model.linears import LinearWays
from mlxpaged.model.replay import BLOCKS, Replay, find_replay
from mlxpaged.model.rotation import Rotation, StepOffset

from ..emulator import FORWARD, EmulatorLauncher, require_tools
from .families import tiny_model
from .rig import loaded

Graph = Callable[..., tuple[mx.array, mx.array]]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_tools()
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))


def verdict(name: str, context_len: int = 4096) -> Replay:
    model, config = tiny_model(name)
    spec = probe(model)
    pool = KernelPool(spec, (BLOCKS,) * len(spec.windows), EmulatorLauncher(passes=(FORWARD,)))
    return find_replay(model, config, context_len, lambda: pool, LinearWays(join=True))


def traced_anew(graph: Graph) -> Graph:
    """What a correct compilation gives; the emulator itself cannot be compiled."""
    return graph


def frozen(graph: Graph) -> Graph:
    """A graph that took its first inputs for constants."""
    results: list[Any] = []

    def call(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        if not results:
            results.append(graph(*arrays))
        return results[0]

    return call


def without_its_tables(graph: Graph) -> Graph:
    """A graph whose reads find the null block: as if they had come before the step's own writes."""

    def call(token: mx.array, ids: mx.array, sent: mx.array, *tables: mx.array) -> tuple[mx.array, ...]:
        changes = 2 * len(ids)  # what so many places of the table hold now comes last
        sent = mx.concatenate([sent[:-changes], mx.zeros_like(sent[-changes:])])
        return graph(token, ids, sent, *map(mx.zeros_like, tables))

    return call


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_true_graphs_may_be_replayed_and_that_is_remembered(name, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(compiled, "compile_graph", traced_anew)
    assert verdict(name) == Replay("fused")
    (record,) = (tmp_path / "checks").iterdir()
    assert json.loads(record.read_text())["error"] < 1e-5
    monkeypatch.setattr(compiled, "compile_graph", frozen)
    assert verdict(name) == Replay("fused")
    record.write_text("{")
    found = verdict(name)
    assert found.graphs is None and "replayed, their logits are off by" in str(found.why)


@pytest.mark.parametrize("false", [frozen, without_its_tables])
def test_false_graphs_are_found_out(false, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "compile_graph", false)
    found = verdict("llama", context_len=256)
    assert found.graphs is None and "replayed, their logits are off by" in str(found.why)


def at_twice_the_positions(self: StepOffset, rotation: Rotation, width: int) -> mx.array:
    """Rotations that no graph may be replayed with, though each rope was understood."""
    return rotation.table(self.positions * 2, width)


def at_the_first_rows_position(self: StepOffset, rotation: Rotation, width: int) -> mx.array:
    """What a kernel gives that reads one row of the table for all tokens."""
    return rotation.table(mx.full(self.positions.shape, self.positions[0]), width)


@pytest.mark.parametrize("table", [at_twice_the_positions, at_the_first_rows_position])
def test_false_rotations_are_found_out_and_plain_graphs_serve(table, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(compiled, "compile_graph", traced_anew)
    monkeypatch.setattr(StepOffset, "table", table)
    found = verdict("llama", context_len=256)
    assert found.graphs == "plain" and str(found.why).startswith("replayed, their logits are off by")
    plain, fused = sorted((tmp_path / "checks").iterdir(), key=lambda record: len(record.name))
    assert plain.name.startswith("replay-") and fused.name.startswith("replay-fused-")
    fused.unlink()  # as an earlier version left it, which knew plain graphs only
    assert verdict("llama", context_len=256) == found
    monkeypatch.setattr(compiled, "compile_graph", frozen)  # would be found out, if both were not remembered
    assert verdict("llama", context_len=256) == found


def test_a_kernel_that_failed_its_self_test_is_in_no_graph(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(compiled, "compile_graph", traced_anew)
    assert verdict("llama") == Replay("fused")  # is remembered
    path = AttentionPath(EmulatorLauncher(passes=(FORWARD,)), PathChoice(), Device("metal", "X"), "told to")
    model, config = tiny_model("llama")
    path = replace(path, spared=frozenset({"rope_write"}))
    found = serving.replay(loaded(model, config), probe(model), path, None)
    assert found == Replay("plain", "it failed its self-test")
    finding = examine._decode_steps(found)
    assert finding.value == "replayed as graphs, without rope_write: it failed its self-test"


def test_a_device_that_compiles_no_graph_says_so_and_nothing_is_remembered(monkeypatch, tmp_path) -> None:
    def refused(graph: Graph) -> Graph:
        raise RuntimeError("[metal] no such thing\nsecond line")

    monkeypatch.setattr(compiled, "compile_graph", refused)
    assert verdict("llama") == Replay(None, "replaying them failed: RuntimeError: [metal] no such thing")
    assert not (tmp_path / "checks").exists()


def test_steps_are_built_anew_where_replaying_is_wrong_and_the_doctor_tells(monkeypatch, caplog) -> None:
    path = AttentionPath(EmulatorLauncher(passes=(FORWARD,)), PathChoice(), Device("metal", "X"), "told to")
    model, config = tiny_model("llama")
    tiny = loaded(model, config)
    monkeypatch.setattr(compiled, "compile_graph", traced_anew)
    assert serving._graphs(tiny, probe(model), path, None) == "fused"
    assert examine._steps(tiny, probe(model), path)[-1].value == "replayed as graphs"
    why = "replayed, their logits are off by 90.0% of the largest"
    monkeypatch.setattr(serving, "find_replay", lambda *_: Replay("plain", why))
    assert serving._graphs(tiny, probe(model), path, None) == "plain" and not caplog.text
    finding = examine._steps(tiny, probe(model), path)[-1]
    assert finding.value == f"replayed as graphs, without rope_write: {why}" and not finding.problem
    monkeypatch.setattr(serving, "find_replay", lambda *_: Replay(None, why))
    assert serving._graphs(tiny, probe(model), path, None) is None
    assert "each decode step of tiny is built anew, which costs time: replayed" in caplog.text
    assert examine._steps(tiny, probe(model), path)[-1].value.startswith("built anew each time: replayed, their")
