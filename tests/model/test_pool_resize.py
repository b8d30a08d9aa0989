"""Pools that change size while they hold KV: nothing kept is lost, and replies do not notice."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.model.kvpool import resized
from mlxpaged.model.kvspec import probe
from mlxpaged.model.plainpool import PlainPool
from mlxpaged.model.poolsize import PoolSizer

from .families import VOCAB, tiny_model
from .rig import Rig, Stock, assert_equal_to_stock

FAMILIES = ["llama", "gpt_oss"]


def test_resizing_keeps_what_fits_and_holds_no_more_than_both_sizes() -> None:
    array = mx.arange(64 * 1024, dtype=mx.float32).reshape(64, 16, 8, 8)
    mx.eval(array)
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    larger = resized(array, 100)
    assert larger.nbytes == 100 * 4096 and mx.get_peak_memory() - before <= 100 * 4096 + 8192
    assert np.array_equal(np.array(larger[:64]), np.array(array)) and not np.array(larger[64:]).any()
    smaller = resized(larger, 10)
    del larger
    assert mx.get_active_memory() - before <= 10 * 4096 + 8192
    assert np.array_equal(np.array(smaller), np.array(array[:10]))


def test_a_group_is_resized_alone() -> None:
    model, _ = tiny_model("gpt_oss")
    pool = PlainPool(probe(model), (8, 6))
    pool.resize((20, 6))
    assert pool.num_blocks == (20, 6)
    assert sorted({len(array) for array in pool.pending()}) == [6, 20]


@pytest.mark.parametrize("family", FAMILIES)
def test_replies_through_a_growing_and_shrinking_pool_equal_stock(family: str) -> None:
    model, config = tiny_model(family)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([5, 40, 90]))] for _ in range(10)]
    stock = Stock(model)
    expected = [stock.reply(prompt, 24) for prompt in prompts]
    rig = Rig(model, config, num_blocks=160, start_blocks=9, step_budget=32)
    for index, prompt in enumerate(prompts):
        rig.add(index, prompt, max_tokens=24)
        for _ in range(rng.randrange(6)):
            rig.step()
        if index == 6:
            rig.core.shrink()
            rig.core.scheduler.check()
    rig.run()
    for index, wanted in enumerate(expected):
        assert_equal_to_stock(rig.replies[index], wanted, f"{family} {index}")
    sizes = [pool.num_blocks for pool in rig.core.scheduler.blocks.pools]
    assert tuple(sizes) == rig.core.runner.pool.num_blocks and min(sizes) > 9
    assert rig.core.scheduler.preemptions == 0
    rig.core.shrink()
    assert rig.core.runner.pool.num_blocks == (9,) * len(sizes)
    rig.core.scheduler.check()


@pytest.mark.parametrize("refusing", ["no spare memory", "the device raises"])
def test_a_device_without_memory_leaves_the_pool_and_the_replies_as_they_are(
    refusing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = tiny_model("llama")
    expected = [Stock(model).reply([7 * index + 3] * 30, 40) for index in range(3)]
    rig = Rig(model, config, num_blocks=160, start_blocks=9)
    resize: Any = rig.core._resize
    assert isinstance(resize, PoolSizer)
    if refusing == "no spare memory":
        monkeypatch.setattr(resize, "_spare", lambda: 0)
    else:
        monkeypatch.setattr(rig.core.runner.pool, "resize", lambda sizes: (_ for _ in ()).throw(RuntimeError("full")))
    for index in range(3):
        rig.add(index, [7 * index + 3] * 30, max_tokens=40)
    rig.run()
    assert rig.core.runner.pool.num_blocks == (9,) and rig.core.scheduler.preemptions > 0
    for index, wanted in enumerate(expected):
        assert_equal_to_stock(rig.replies[index], wanted, f"reply {index}")
