"""A request whose K and V overflow spoils its own reply and no other's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.model import serving
from mlxpaged.model.kernelpool import KernelPool
from mlxpaged.model.kvspec import KVSpec

from ..emulator import FORWARD, EmulatorLauncher, require_tools
from .families import tiny_model
from .rig import Rig

SANE = list(range(20, 57))
ILL = 7  # an id whose embedding is NaN


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))


def ill_model(name: str) -> tuple[Any, dict[str, Any]]:
    model, config = tiny_model(name)
    weight = model.model.embed_tokens.weight
    weight[ILL] = float("nan")
    mx.eval(weight)
    return model, config


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_whoever_gets_its_blocks_reads_nothing_of_it(name, prefix_cache) -> None:
    model, config = ill_model(name)
    alone = Rig(model, config, num_blocks=6, prefix_cache=prefix_cache)
    alone.add(0, SANE, 8)
    expected = alone.run()[0]
    rig = Rig(model, config, num_blocks=6, prefix_cache=prefix_cache)
    for index, prompt in enumerate(([ILL] * 60, SANE, SANE)):
        rig.add(index, prompt, 8)
        rig.run()
    assert rig.replies[1] == rig.replies[2] == expected


@pytest.mark.parametrize("way", ["kernels", "gather", "rounded"])
def test_blocks_full_of_nan_and_a_neighbour_full_of_it_change_nothing_over_the_kernels(way, monkeypatch) -> None:
    require_tools()
    options: dict[str, Any] = {"gather": {"use_kernel": lambda rows, context: False}, "rounded": {"round_chunks": 24}}
    ill = [False]

    def pool(spec: KVSpec, num_blocks: Sequence[int], path: object) -> KernelPool:
        made = KernelPool(spec, num_blocks, EmulatorLauncher(passes=(FORWARD,)), **options.get(way, {}))
        if ill[0]:
            for array in (array for pair in made._pools for array in pair):
                np.array(array, copy=False)[1:] = np.nan
        return made

    monkeypatch.setattr(serving, "make_pool", pool)
    replies = []
    for ill[0] in (False, True):
        rig = Rig(*ill_model("gpt_oss"), num_blocks=12, step_budget=128)
        rig.add(0, SANE, 5)
        if ill[0]:
            rig.add(1, [ILL] * 41, 2)
        replies.append(rig.run()[0])
    assert replies[0] == replies[1]
