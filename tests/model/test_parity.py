"""Greedy tokens of the paged engine equal stock mlx-lm's, family by family, however the steps are cut."""

from __future__ import annotations

import numpy as np
import pytest

from mlxpaged.model.inputs import DecodeInputs
from mlxpaged.model.kvspec import probe

from .families import PAGED, SOLO, tiny_model
from .rig import Rig, Stock, assert_equal_to_stock

NEW = 12


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 199, size).tolist() for size in (90, 1, 17, 33, 64, 5, 48, 16)]


@pytest.fixture(scope="module", params=PAGED)
def family(request, tmp_path_factory):
    model, config = tiny_model(request.param)
    stock = Stock(model)
    return request.param, model, config, [stock.reply(prompt, NEW) for prompt in prompts()]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))


def test_a_probed_family_is_served_by_the_paged_path(family) -> None:
    name, model, config, _ = family
    assert Rig(model, config).built.served_by == "paged", f"{name} fell back"


def test_alone_equals_stock(family) -> None:
    name, model, config, expected = family
    rig = Rig(model, config)
    rig.add(0, prompts()[0], NEW)
    assert_equal_to_stock(rig.run()[0], expected[0], f"{name} alone")


@pytest.mark.parametrize("budget", [7, 16, 64])
def test_batched_with_seven_others_and_chunked_equals_stock(family, budget) -> None:
    name, model, config, expected = family
    rig = Rig(model, config, step_budget=budget)
    for index, prompt in enumerate(prompts()):
        rig.add(index, prompt, NEW)
    replies = rig.run()
    for index in range(8):
        assert_equal_to_stock(replies[index], expected[index], f"{name} budget {budget} prompt {index}")


def test_after_a_forced_preemption_equals_stock(family) -> None:
    name, model, config, expected = family
    rig = Rig(model, config, step_budget=32)
    for index in (0, 3):
        rig.add(index, prompts()[index], NEW)
    while len(rig.replies.get(3, [])) < 4:
        rig.step()
    scheduler = rig.core.scheduler
    for live in scheduler.live():
        scheduler.preempt(live)
    scheduler.blocks.forget()  # nothing is found again: both are computed anew from their ids
    replies = rig.run()
    assert scheduler.preemptions == 2
    for index in (0, 3):
        assert_equal_to_stock(replies[index], expected[index], f"{name} preempted prompt {index}")


def test_on_a_prefix_hit_equals_stock(family) -> None:
    name, model, config, expected = family
    rig = Rig(model, config)
    rig.add(0, prompts()[0], NEW)
    rig.run()
    rig.add(1, prompts()[0], NEW)  # the whole prompt is known
    rig.run()
    again = prompts()[0][:40] + prompts()[4]  # 40 tokens are, in the middle of a block
    rig.add(2, again, NEW)
    replies = rig.run()
    assert rig.cached[1] == len(prompts()[0]) - 1 and rig.cached[2] in (39, 40)
    assert_equal_to_stock(replies[1], expected[0], f"{name} full hit")
    assert_equal_to_stock(replies[2], Stock(model).reply(again, NEW), f"{name} partial hit")


@pytest.mark.parametrize("name", SOLO)
def test_what_cannot_be_paged_is_served_one_at_a_time(name) -> None:
    model, config = tiny_model(name)
    rig = Rig(model, config)
    assert rig.built.served_by == "one at a time"
    assert "one request at a time" in rig.built.notes[0]
    chosen = prompts()[:4]
    for index, prompt in enumerate(chosen):
        rig.add(index, prompt, NEW)
    replies = rig.run()
    stock = Stock(model)
    for index, prompt in enumerate(chosen):
        assert_equal_to_stock(replies[index], stock.reply(prompt, NEW), f"{name} prompt {index}")


def test_the_probe_finds_windows_widths_and_sinks() -> None:
    spec = probe(tiny_model("gpt_oss")[0])
    assert spec.windows == (None, 24) and spec.group_of == (1, 0, 1, 0)
    assert all(layer.sinks for layer in spec.layers)
    widths = {layer.k_width for layer in probe(tiny_model("gemma4_text")[0]).layers}
    assert widths == {16, 32}


def test_a_ragged_batch_is_read_in_parts_of_like_length() -> None:
    counts = np.array([28, 27, 13, 6, 4, 3, 2, 2], np.int32)
    tables = np.zeros((8, 28), np.int32)
    zeros = np.zeros(8, np.int32)
    parts = DecodeInputs(tables, counts, zeros, counts * 16 - 1, tables).parts
    assert [part.counts.tolist() for part in parts] == [[28, 27], [13], [6, 4, 3, 2, 2]]
    assert sum(part.tables.size for part in parts) < tables.size / 2
    even = DecodeInputs(tables, np.full(8, 28, np.int32), zeros, zeros, tables).parts
    assert len(even) == 1
