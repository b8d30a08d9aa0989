"""Faults in the middle of things: each ends what it concerns, and nobody waits for an end that never comes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.engine.events import Delta
from mlxpaged.engine.replies import TextStream
from mlxpaged.errors import BadParameter, Overloaded
from mlxpaged.model import poolsize
from mlxpaged.model.runner import ModelRunner
from mlxpaged.sched.allocator import KVAllocator
from mlxpaged.sched.requests import FinishReason, SamplingParams

from ..model.families import tiny_model
from ..model.rig import Rig
from .conftest import Asked


def lost(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of memory")


def failing_on_the_device() -> mx.array:
    """An array that raises when it is evaluated, and never before."""
    halves, index = mx.zeros((2, 4, 4), mx.float16), mx.array([0], mx.uint32)
    return mx.gather_mm(halves, halves, index, index).astype(mx.float32).sum()


@pytest.fixture
def rig(monkeypatch, tmp_path) -> Rig:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    return Rig(*tiny_model("llama"))


def fail_a_step(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModelRunner.forward
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "forward", lambda *given: real(*given) + failing_on_the_device())
        with pytest.raises(RuntimeError, match="GatherMM"):
            rig.step()
    rig.core.fail("the device went away", rig._take)


def test_an_end_is_told_although_the_others_are_cancelled_meanwhile(rig) -> None:
    rig.add(0, [1, 2, 3], 3)
    rig.add(1, [4, 5, 6], 30)
    while len(rig.replies.get(0, [])) < 2:
        rig.step()
    rig.core.cancel(1)
    assert not rig.core.idle
    rig.run()
    assert rig.ends[0] is FinishReason.LENGTH and len(rig.replies[0]) == 3


def test_an_end_is_told_although_the_pool_shrinks_meanwhile(make_service, monkeypatch) -> None:
    """One step ahead, shrinking commits what is in flight: for a last reply that may be its end."""
    for name in ("LOOK_S", "IDLE_LOOK_S"):
        monkeypatch.setattr(f"mlxpaged.engine.upkeep.{name}", 0.0)
    pressed = [False]

    def pressed_once() -> bool:
        now, pressed[0] = pressed[0], False
        return now

    tiny = make_service(ahead=1, num_blocks=60, start_blocks=3, pressed=pressed_once)
    for count in range(1, 6):
        tiny.ask([(place * 7 + count) % 200 for place in range(100)], max_tokens=2, ignore_eos=True).wait()  # grows
        asked = Asked()

        def sink(delta: Delta, asked: Asked = asked, count: int = count) -> None:
            pressed[0] = len(asked.ids) + len(delta.token_ids) == count
            asked.sink(delta)

        tiny.service.submit([count, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True), sink)
        assert asked.wait().finish is FinishReason.LENGTH and len(asked.ids) == 5


def test_penalties_work_after_a_step_that_failed(rig, monkeypatch) -> None:
    rig.add(0, [1, 2, 3], 6, repetition_penalty=1.2)
    expected = rig.run()[0]
    rig.add(1, [1, 2, 3], 6, repetition_penalty=1.2)
    fail_a_step(rig, monkeypatch)
    rig.add(2, [4, 5, 6], 6)
    rig.add(3, [1, 2, 3], 6, repetition_penalty=1.2)
    rig.run()
    assert [rig.ends[index] for index in (1, 2, 3)] == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]
    assert rig.replies[3] == expected


def test_a_fault_within_a_commit_ends_that_step_alone(rig, monkeypatch) -> None:
    real, failing = KVAllocator.settle, [True]

    def settle(self: KVAllocator, row: int) -> None:
        if failing.pop() if failing else False:
            raise ValueError("a bug of ours")
        real(self, row)

    monkeypatch.setattr(KVAllocator, "settle", settle)
    for index in range(3):
        rig.add(index, [index] * 20, 40)
    with pytest.raises(ValueError, match="a bug of ours"):
        while not rig.core.idle:
            rig.step()
    rig.core.fail("a bug of ours", rig._take)
    rig.core.scheduler.check()
    assert set(rig.ends.values()) == {FinishReason.ERROR}
    rig.add(9, [1, 2, 3], 6)
    assert len(rig.run()[9]) == 6


def test_a_pool_that_cannot_be_made_again_costs_the_model_and_it_can_be_loaded_again(make_service, monkeypatch) -> None:
    tiny = make_service()
    pool = type(tiny.service._host.core.runner.pool)
    first, second = (tiny.ask(prompt, max_tokens=300, ignore_eos=True) for prompt in ("aaaa", "bbbb"))
    assert first.first.wait(20)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "renew", lost)
        patch.setattr(pool, "pending", lost)
        patch.setattr(ModelRunner, "forward", lost)
        for asked in (first, second):
            last = asked.wait()
            assert last.finish is FinishReason.ERROR and "out of memory" in (last.error or "")
    assert tiny.service.alive
    tiny.info = tiny.service.load("tiny").result(60)
    assert tiny.ask("cccc", max_tokens=3, ignore_eos=True).wait().finish is FinishReason.LENGTH


def test_a_pool_is_given_up_before_another_takes_its_place(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    runner: Any = Rig(*tiny_model("llama"), num_blocks=8000).core.runner
    held = runner.pool.nbytes
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with monkeypatch.context() as patch:
        patch.setattr(runner.pool, "pending", lost)
        assert runner.recover() is False
    assert runner.pool.nbytes == held and mx.get_peak_memory() - before < held / 10


def test_an_engine_whose_thread_ended_ends_its_replies_and_takes_no_more(make_service, monkeypatch) -> None:
    tiny = make_service()
    asked = tiny.ask("aaaa", max_tokens=300, ignore_eos=True)
    assert asked.first.wait(20)
    monkeypatch.setattr(tiny.service, "_turn", lost)
    last = asked.wait()
    assert last.finish is FinishReason.ERROR and "the engine has stopped" in (last.error or "")
    tiny.service._thread.join(20)
    with pytest.raises(Overloaded, match="the engine has stopped"):
        tiny.ask("bbbb", max_tokens=3)


def test_text_that_cannot_be_made_ends_its_own_reply(make_service, monkeypatch) -> None:
    tiny = make_service()
    real = TextStream.add

    def add(self: TextStream, token_id: int, logprob: Any = None) -> Any:
        if "never" in self._stops:
            raise ValueError("no such character")
        return real(self, token_id, logprob)

    monkeypatch.setattr(TextStream, "add", add)
    asked = [tiny.ask("hello", max_tokens=9, ignore_eos=True, stop=stop) for stop in ((), ("never",), ())]
    ends = [one.wait() for one in asked]
    assert [end.finish for end in ends] == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert "no such character" in (ends[1].error or "")


@pytest.mark.parametrize("field", ["top_k", "min_tokens", "choice"])
def test_a_number_that_no_column_holds_is_refused(field: str) -> None:
    with pytest.raises(BadParameter, match=field):
        SamplingParams(**{field: 2**31})
    assert getattr(SamplingParams(**{field: 2**31 - 1}), field) == 2**31 - 1


def test_lasting_pressure_and_a_slow_pool_still_serve_the_last_reply(make_service, monkeypatch) -> None:
    """Growing takes longer than the time between two looks at the memory."""
    monkeypatch.setattr("mlxpaged.engine.upkeep.LOOK_S", 0.0)
    sizes: list[tuple[int, ...]] = []
    real = poolsize.PoolSizer.__call__

    def noting(self: Any, wanted: Any) -> Any:
        sizes.append(tuple(wanted))
        return real(self, wanted)

    monkeypatch.setattr(poolsize.PoolSizer, "__call__", noting)
    tiny = make_service(num_blocks=60, start_blocks=3, pressed=lambda: True)
    prompt = np.arange(1, 100).tolist()
    assert tiny.ask(prompt, max_tokens=3, ignore_eos=True).wait().finish is FinishReason.LENGTH
    assert len(sizes) < 20
