"""Steps write the pool where it lies: no copy of it is ever made."""

from __future__ import annotations

import mlx.core as mx
import pytest

from .families import tiny_model
from .rig import Rig


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_hundred_steps_need_less_than_one_more_layer_of_the_pool(name, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    rig = Rig(*tiny_model(name), num_blocks=8000)
    for index in range(4):
        rig.add(index, [index + 1] * 40, 300)
    for _ in range(10):
        rig.step()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(100):
        rig.core.step(rig._take)
    layer = rig.core.runner.kv_bytes / len(rig.core.runner.pool.spec.layers)
    assert layer > 10e6
    assert mx.get_peak_memory() - before < layer
