"""Decode graphs in which one kernel rotates queries and keys and writes K and V: stock mlx-lm's tokens, family by
family, through the whole engine on emulated Metal text; plain graphs where a model does not let them be fused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama

from mlxpaged.kernels.choose import AttentionPath, Device
from mlxpaged.kernels.launch import KernelSpec
from mlxpaged.kernels.timing import PathChoice
from mlxpaged.model import compiled, serving
from mlxpaged.model.fusedstep import why_not_fused

from ..emulator import FORWARD, EmulatorLauncher, require_tools
from .families import tiny_model
from .rig import Rig, Stock, assert_equal_to_stock

NEW = 6
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + i / 2 for i in range(8)]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}

FUSED: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("llama", {}, 3),
    "wavelengths of llama3": ("llama", {"rope_scaling": LLAMA3}, 3),
    "q and k norms": ("qwen3", {}, 3),
    "two ropes and a window": ("gemma3_text", {"rope_theta": 1e6}, 4),
    "yarn, sinks and a window": ("gpt_oss", {}, 4),
    "traditional, in part": ("glm4", {}, 3),
    "scaled in two lengths": ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64}, 3),
    "layers without rope": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}, 2),
}
"""What is special: family, changes of its config, layers with a rope."""


class Counting:
    """The emulator, and how often it started each kernel."""

    def __init__(self) -> None:
        self._launch = EmulatorLauncher(passes=(FORWARD,))
        self.started: Counter[str] = Counter()

    def __call__(self, spec: KernelSpec, *args: Any, **kwargs: Any) -> list[mx.array]:
        self.started[spec.name] += 1
        return self._launch(spec, *args, **kwargs)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counting:
    """Everything as on a GPU, but graphs are traced anew at each step: the eager emulator cannot be compiled."""
    require_tools()
    launch = Counting()
    path = AttentionPath(launch, PathChoice(), Device("metal", "X"), "told to")
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(serving, "attention_path", lambda *_: path)
    monkeypatch.setattr(compiled, "compile_graph", lambda graph: graph)
    return launch


def run(model: nn.Module, config: dict[str, Any], launch: Counting) -> tuple[Counter[str], int]:
    """Several replies at once, equal to stock's; kernels started by a step that only decodes, and the layers."""
    prompts = [np.random.default_rng(3).integers(0, 199, size).tolist() for size in (50, 1, 17, 33)]
    stock = Stock(model)
    expected = [stock.reply(prompt, NEW + index) for index, prompt in enumerate(prompts)]
    rig = Rig(model, config, num_blocks=40, step_budget=200, ahead=0)
    for index, prompt in enumerate(prompts):
        rig.add(index, prompt, NEW + index)
    steps = []
    while not rig.core.idle:
        launch.started.clear()
        rig.step()
        steps.append(Counter(launch.started))
    for index in range(len(prompts)):
        assert_equal_to_stock(rig.replies[index], expected[index], f"prompt {index}")
    last = next(step for step in reversed(steps) if step)
    assert steps.count(last) > NEW / 2
    return last, len(model.layers)


@pytest.mark.parametrize("what", FUSED)
def test_fused_graphs_give_stock_tokens(what: str, counting: Counting) -> None:
    family, changes, roped = FUSED[what]
    model, config = tiny_model(family, **changes)
    step, layers = run(model, config, counting)
    written = {"kv_write": layers - roped} if layers > roped else {}
    assert step == {"rope_write": roped, "paged_decode": layers, **written}


@pytest.mark.parametrize("family", ["cohere2", "gemma4_text", "ministral3"])
def test_a_model_that_does_more_than_rotate_has_plain_graphs(family: str, counting: Counting) -> None:
    """One converts its queries after the rope, one makes an array of its positions, one scales queries by position."""
    model, config = tiny_model(family)
    step, layers = run(model, config, counting)
    assert step["rope_write"] == 0 and step["paged_decode"] == layers
    assert "it does more than rotate queries and keys by their positions (" in str(why_not_fused(model))


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("no array\nat all"), ValueError("  ")])
def test_whatever_a_model_raises_for_a_stand_in_it_has_plain_graphs(error: Exception, monkeypatch) -> None:
    stock = llama.Attention.__call__

    def picky(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(cache.offset, (int, mx.array)):
            raise error
        return stock(self, x, mask, cache)

    monkeypatch.setattr(llama.Attention, "__call__", picky)
    model, _ = tiny_model("llama")
    told = str(error).splitlines()[0] if str(error).strip() else type(error).__name__
    assert why_not_fused(model) == f"it does more than rotate queries and keys by their positions ({told})"
