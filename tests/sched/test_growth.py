"""The pool begins small: when it grows, when it does not, what it gives back, and what is never lost by it."""

from __future__ import annotations

import numpy as np
import pytest

from mlxpaged.sched.allocator import GroupSpec
from mlxpaged.sched.requests import Request, SamplingParams

from .test_scheduler_properties import Rig, reference


def request(request_id: int, prompt: list[int], new: int) -> Request:
    return Request(request_id, np.asarray(prompt, np.int32), SamplingParams(max_tokens=new, ignore_eos=True))


def rig(start: int, most: int, ahead: int = 0) -> Rig:
    return Rig([GroupSpec(start, most_blocks=most)], rows=8, budget=64, ahead=ahead, context=640)


def sizes(r: Rig) -> int:
    return r.scheduler.blocks.pools[0].num_blocks


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_short_pool_grows_before_anybody_is_preempted(ahead: int) -> None:
    r = rig(4, 200, ahead)
    prompts = {index: [index % 4, *[index // 4] * 60] for index in range(8)}
    for index, prompt in prompts.items():
        r.scheduler.add(request(index, prompt, 100))
    r.drain()
    assert r.scheduler.preemptions == 0
    assert r.replies == {
        i: reference(p, SamplingParams(max_tokens=100, ignore_eos=True), 161) for i, p in prompts.items()
    }
    assert 8 * 11 < sizes(r) <= 200


def test_it_at_least_doubles_and_stops_at_its_ceiling() -> None:
    r = rig(4, 11)
    r.scheduler.add(request(1, [0] * 60, 1))
    seen = [sizes(r)]
    while not r.scheduler.idle:
        r.step()
        seen.append(sizes(r))
    assert sorted(set(seen)) == [4, 8]
    r.scheduler.add(request(2, [1] * 150, 1))
    r.drain()
    assert sizes(r) == 11


def test_cached_blocks_are_kept_as_long_as_the_pool_may_grow() -> None:
    r = rig(6, 40)
    for index in range(6):
        r.scheduler.add(request(index, [index % 4, index // 4, *[2] * 62], 1))
        r.drain()
    pool = r.scheduler.blocks.pools[0]
    assert pool.evictions == 0 and pool.counts()["cached"] >= 6 * 4
    before = r.scheduler.cached_tokens
    r.scheduler.add(request(9, [0, 0, *[2] * 62], 1))
    r.drain()
    assert r.scheduler.cached_tokens - before == 63


def test_a_prompt_is_measured_against_the_ceiling_not_the_present_size() -> None:
    assert rig(4, 30).scheduler.max_prompt == 29 * 16 - 1


def test_a_pool_that_was_refused_memory_preempts_instead_and_may_try_again_later() -> None:
    r = rig(6, 40)
    for index in range(2):
        r.scheduler.add(request(index, [index] * 30, 40))
    r.device.resize = lambda sizes: None  # the machine gives nothing
    grown = r.scheduler.blocks.grown
    r.scheduler.blocks.grown = lambda sizes: grown((6,))
    r.drain()
    assert r.scheduler.preemptions > 0 and sizes(r) == 6
    r.scheduler.blocks.allow_growth(True)
    assert not r.scheduler.blocks.fits([8]) and r.scheduler.blocks.growth() == (14,)


def test_growth_that_is_not_allowed_is_not_asked_for() -> None:
    r = rig(6, 40)
    r.scheduler.blocks.allow_growth(False)
    assert not r.scheduler.blocks.fits([8]) and r.scheduler.blocks.growth() is None


def test_shrinking_gives_back_what_is_only_cached_and_keeps_what_rows_hold() -> None:
    r = rig(4, 64)
    r.scheduler.add(request(8, [0, 1] * 40, 60))
    r.step()
    for index in range(4):
        r.scheduler.add(request(index, [index] * 150, 1))
    while len(r.ends) < 4:
        r.step()
    before = sizes(r)
    held = max(int(r.scheduler.table.held(0, row).max(initial=0)) for row in range(8))
    r.shrink()
    assert sizes(r) == max(held + 1, 4) < before
    r.drain()
    assert r.replies[8] == reference([0, 1] * 40, SamplingParams(max_tokens=60, ignore_eos=True), 140)
    r.shrink()
    assert sizes(r) == 4 and r.scheduler.blocks.pools[0].counts()["used"] == 0
