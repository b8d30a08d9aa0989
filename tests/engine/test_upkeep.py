"""What an engine gives back, and when: MLX's caches after a quiet while, cached K/V when the system wants memory."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpaged.engine.upkeep import IDLE_LOOK_S, LOOK_S, QUIET_S, Upkeep
from tests.model.families import tiny_model
from tests.model.rig import Rig, Stock, assert_equal_to_stock


class Watched:
    """An Upkeep whose clock, pressure and releases are the test's."""

    def __init__(self) -> None:
        self.now, self.pressed, self.looks, self.releases = 0.0, False, 0, 0
        self.upkeep = Upkeep(self.look, self.release, lambda: self.now)

    def look(self) -> bool:
        self.looks += 1
        return self.pressed

    def release(self) -> None:
        self.releases += 1


def grown_rig() -> Rig:
    rig = Rig(*tiny_model("llama"), num_blocks=160, start_blocks=9)
    for index in range(4):
        rig.add(index, [index] * 100, max_tokens=4)
    rig.run()
    assert rig.core.shrinkable
    return rig


def test_caches_are_released_once_after_a_quiet_while_and_then_nothing_wakes_the_engine() -> None:
    watched = Watched()
    watched.upkeep.turn(None, working=True)
    assert watched.upkeep.wait_s(None) == QUIET_S
    watched.now = QUIET_S - 0.1
    watched.upkeep.turn(None, working=False)
    assert watched.releases == 0
    watched.now = QUIET_S
    watched.upkeep.turn(None, working=False)
    assert (watched.releases, watched.upkeep.wait_s(None)) == (1, None)
    watched.now = 1000.0
    watched.upkeep.turn(None, working=False)
    assert watched.releases == 1
    watched.upkeep.turn(None, working=True)
    assert watched.upkeep.wait_s(None) == QUIET_S


def test_pressure_is_looked_for_every_two_seconds_of_work() -> None:
    watched, rig = Watched(), grown_rig()
    for turn in range(100):
        watched.now = turn * 0.1
        watched.upkeep.turn(rig.core, working=True)
    assert watched.looks == 100 * 0.1 / LOOK_S


def test_under_pressure_the_cached_part_goes_before_anything_else() -> None:
    watched, rig = Watched(), Rig(*tiny_model("llama"), num_blocks=160, start_blocks=9)
    prompt = [7, 8, 9] * 20
    rig.add(9, prompt, max_tokens=60)
    rig.step()
    for index in range(4):
        rig.add(index, [index] * 100, max_tokens=4)
    while len(rig.ends) < 4:
        rig.step()
    before = rig.core.runner.kv_bytes
    watched.pressed = True
    watched.upkeep.turn(rig.core, working=True)
    rig.core.scheduler.check()
    assert rig.core.runner.kv_bytes < before and watched.releases == 1
    assert rig.core.scheduler.blocks.held_back
    rig.run()
    model, _ = tiny_model("llama")
    assert_equal_to_stock(rig.replies[9], Stock(model).reply(prompt, 60), "through the shrinking")
    assert rig.core.scheduler.preemptions == 0


def test_an_idle_engine_looks_only_while_it_has_something_to_give() -> None:
    watched, rig = Watched(), grown_rig()
    watched.upkeep.turn(rig.core, working=False)
    watched.now = QUIET_S
    watched.upkeep.turn(rig.core, working=False)
    assert watched.upkeep.wait_s(rig.core) == IDLE_LOOK_S - QUIET_S
    watched.now, watched.pressed = IDLE_LOOK_S, True
    watched.upkeep.turn(rig.core, working=False)
    assert rig.core.runner.pool.num_blocks == (9,)
    assert watched.upkeep.wait_s(rig.core) is None


def test_under_pressure_rows_give_way_to_each_other_but_the_last_one_may_still_grow() -> None:
    watched, rig = Watched(), Rig(*tiny_model("llama"), num_blocks=160, start_blocks=9)
    watched.pressed = True
    watched.upkeep.turn(rig.core, working=True)
    model, _ = tiny_model("llama")
    for index in range(2):
        rig.add(index, [index + 1] * 60, max_tokens=100)
    rig.run()
    for index in range(2):
        assert_equal_to_stock(rig.replies[index], Stock(model).reply([index + 1] * 60, 100), f"reply {index}")


def test_growth_is_allowed_again_once_the_pressure_is_over() -> None:
    watched, rig = Watched(), grown_rig()
    watched.pressed = True
    watched.upkeep.turn(rig.core, working=True)
    watched.now, watched.pressed = LOOK_S, False
    watched.upkeep.turn(rig.core, working=True)
    assert not rig.core.scheduler.blocks.held_back


def test_a_service_under_pressure_answers_as_before(make_service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxpaged.engine.upkeep.LOOK_S", 0.0)
    calm = make_service(num_blocks=160, start_blocks=9)
    expected = [calm.ask(f"{index} said: " * 9, max_tokens=40) for index in range(4)]
    for one in expected:
        one.wait()
    tight = make_service(num_blocks=160, start_blocks=9, pressed=lambda: True)
    asked = [tight.ask(f"{index} said: " * 9, max_tokens=40) for index in range(4)]
    for one in asked:
        one.wait()
    assert [one.ids for one in asked] == [one.ids for one in expected]


def test_an_idle_service_turns_its_loop_only_for_what_is_due(
    make_service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = make_service(num_blocks=40)
    waits: list[float | None] = []
    take = tiny.service._inbox.get

    class Inbox:
        def get(self, block: bool, timeout: float | None) -> Any:
            waits.append(timeout) if block else None
            return take(block, timeout)

        put = staticmethod(tiny.service._inbox.put)

    monkeypatch.setattr(tiny.service, "_inbox", Inbox())
    tiny.ask("hello", max_tokens=3).wait()
    tiny.ask("hello again", max_tokens=3).wait()
    assert 1 <= len(waits) <= 4  # once before and after each request, not in a loop
    assert all(seconds is None or seconds > QUIET_S - 2 for seconds in waits)
