"""The engine thread: requests from any thread, ends of every kind, faults that end one step and not the engine."""

from __future__ import annotations

import random
import threading
import time

import pytest

from mlxpaged.engine.events import Progress
from mlxpaged.errors import BadParameter, Overloaded, PromptTooLong
from mlxpaged.model.runner import ModelRunner, PendingStep
from mlxpaged.sched.requests import FinishReason


def settled(tiny, **expected):
    """Wait until the engine is idle, then its stats."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        stats = tiny.service.stats()
        if stats.num_running == stats.num_waiting == 0 and stats.blocks_used == 0:
            return stats
        threading.Event().wait(0.005)
    raise AssertionError(f"never idle: {tiny.service.stats()}")


def test_a_reply_has_text_usage_and_timing(make_service) -> None:
    tiny = make_service()
    last = (asked := tiny.ask("hello", max_tokens=5, ignore_eos=True)).wait()
    assert last.finish is FinishReason.LENGTH and last.usage is not None and last.timing is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 5)
    assert asked.text == tiny.info.tokenizer.decode(asked.ids)
    assert 0 <= last.timing.queued_s <= last.timing.ttft_s <= last.timing.total_s


def test_a_request_that_waits_is_told_how_many_go_before_it_and_when_that_changes(make_service, monkeypatch) -> None:
    monkeypatch.setattr("mlxpaged.engine.service._PLACES_EVERY_S", 0.0)
    tiny = make_service(max_rows=1)
    first = tiny.ask("hello", max_tokens=390, ignore_eos=True)
    assert first.first.wait(60)
    second, third = (tiny.ask(prompt, max_tokens=5, ignore_eos=True) for prompt in ("second", "third!"))
    third.wait()
    assert places(first) == [] and places(second) == [0] and places(third) == [1, 0]
    assert third.deltas[0].progress == Progress(0, 6, 0, queue_position=1)


def places(asked) -> list[int]:
    told = [delta.progress.queue_position for delta in asked.deltas if delta.progress]
    return [place for place in told if place is not None]


def test_seeded_replies_repeat_whatever_runs_beside_them(make_service) -> None:
    tiny = make_service()
    alone = tiny.ask("story", max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    alone.wait()
    many = [tiny.ask("story", max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(8)]
    for asked in many:
        asked.wait()
    assert many[5].ids == alone.ids
    assert len({tuple(asked.ids) for asked in many}) > 4


def test_two_hundred_random_requests_with_cancels_on_a_tiny_pool_all_end_rightly(make_service) -> None:
    tiny = make_service(num_blocks=30, max_rows=6, max_queue=300)
    rng = random.Random(1)
    solo: dict[tuple[str, int], list[int]] = {}
    prompts = ["".join(rng.choice("abc") for _ in range(rng.randint(1, 150))) for _ in range(12)]
    asked = []
    for _ in range(200):
        prompt, new = rng.choice(prompts), rng.randint(1, 40)
        one = tiny.ask(prompt, max_tokens=new, ignore_eos=True)
        asked.append((prompt, new, one))
        if rng.random() < 0.25:
            rng.choice(asked)[2].handle.cancel()
    ends = [one.wait().finish for _, _, one in asked]
    assert set(ends) == {FinishReason.LENGTH, FinishReason.CANCELLED}
    settled(tiny)
    for prompt, new, one in asked:
        key = (prompt, 40)
        if key not in solo:
            reference = tiny.ask(prompt, max_tokens=40, ignore_eos=True)
            reference.wait()
            solo[key] = reference.ids
        if one.deltas[-1].finish is FinishReason.LENGTH:
            assert len(one.ids) == new
        assert one.ids == solo[key][: len(one.ids)]
    stats = settled(tiny)
    assert stats.blocks_cached + stats.blocks_free == stats.blocks_total == 29
    assert stats.preemptions > 0


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(make_service, monkeypatch) -> None:
    tiny = make_service()
    expected = (
        before := tiny.ask("same prompt, forty letters long, no more", max_tokens=8, ignore_eos=True)
    ).wait() and before.ids
    real, failing = PendingStep.wait, {"left": 1}

    def wait(self):
        if failing["left"]:
            failing["left"] -= 1
            raise RuntimeError("the device went away")
        return real(self)

    monkeypatch.setattr(PendingStep, "wait", wait)
    last = tiny.ask("another", max_tokens=8).wait()
    assert last.finish is FinishReason.ERROR and "the device went away" in (last.error or "")
    again = tiny.ask("same prompt, forty letters long, no more", max_tokens=8, ignore_eos=True)
    assert again.wait().finish is FinishReason.LENGTH and again.ids == expected
    assert settled(tiny).blocks_used == 0


def test_a_graph_that_cannot_be_built_ends_one_step(make_service, monkeypatch) -> None:
    tiny = make_service()
    real, failing = ModelRunner.forward, {"left": 1}

    def forward(self, inputs, rows):
        if failing["left"]:
            failing["left"] -= 1
            raise ValueError("shapes do not fit")
        return real(self, inputs, rows)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    assert tiny.ask("x", max_tokens=2).wait().finish is FinishReason.ERROR
    assert tiny.ask("x", max_tokens=2, ignore_eos=True).wait().finish is FinishReason.LENGTH


def test_a_sink_that_raises_harms_nobody(make_service) -> None:
    tiny = make_service()
    from mlxpaged.sched.requests import SamplingParams

    def broken(delta):
        raise RuntimeError("face fault")

    tiny.service.submit([1, 2], SamplingParams(max_tokens=3), broken)
    assert tiny.ask("fine", max_tokens=3, ignore_eos=True).wait().finish is FinishReason.LENGTH


def test_a_stop_string_ends_the_reply_and_gives_the_row_back(make_service) -> None:
    tiny = make_service()
    full = tiny.ask("once", max_tokens=30, ignore_eos=True)
    full.wait()
    printable = [piece for piece in full.text if piece.isascii() and piece.isprintable()]
    stop = printable[len(printable) // 2]
    cut = tiny.ask("once", max_tokens=30, ignore_eos=True, stop=(stop,))
    last = cut.wait()
    assert last.finish is FinishReason.STOP and last.stop_reason == stop
    assert cut.text == full.text[: full.text.index(stop)]
    settled(tiny)


def test_cancelling_ends_with_a_delta_and_is_idempotent(make_service) -> None:
    tiny = make_service()
    asked = tiny.ask("long", max_tokens=380, ignore_eos=True)
    asked.first.wait(30)
    for _ in range(3):
        asked.handle.cancel()
    last = asked.wait()
    assert last.finish is FinishReason.CANCELLED and last.usage is not None
    assert last.usage.completion_tokens == len(asked.ids) < 380
    settled(tiny)


def test_bad_requests_are_refused_before_the_engine_sees_them(make_service) -> None:
    tiny = make_service()
    with pytest.raises(BadParameter, match="prompt is empty"):
        tiny.ask([])
    with pytest.raises(BadParameter, match=r"outside 0\.\.257"):
        tiny.ask([258])
    with pytest.raises(BadParameter, match="logit_bias"):
        tiny.ask("x", logit_bias=((900, 1.0),))
    with pytest.raises(PromptTooLong, match=r"400 tokens.*has 400; shorten the prompt$"):
        tiny.ask([1] * 400)
    with pytest.raises(BadParameter, match="temperature is -1"):
        tiny.ask("x", temperature=-1)


@pytest.mark.parametrize(("limit", "flag"), [({"context_len": 96}, "--ctx"), ({"num_blocks": 7}, "--memory-budget")])
def test_the_advice_for_a_prompt_that_is_too_long_is_the_flag_that_helps(make_service, limit, flag) -> None:
    with pytest.raises(PromptTooLong, match=rf"96 tokens.*; shorten the prompt, or raise {flag}$"):
        make_service(**limit).ask([1] * 96)


def test_a_context_above_the_models_own_is_cut_to_it_with_a_note(make_service) -> None:
    info = make_service(context_len=5000).service.model
    assert info.context_len == 400
    assert [note for note in info.notes if "--ctx 5000 is more than" in note and "400 tokens" in note]
    assert not any("--ctx" in note for note in make_service(context_len=400).service.model.notes)


def test_a_full_queue_is_overloaded(make_service) -> None:
    tiny = make_service(max_rows=1, max_queue=2)
    asked = [tiny.ask("x", max_tokens=200, ignore_eos=True) for _ in range(3)]
    with pytest.raises(Overloaded, match="--max-queue"):
        tiny.ask("x")
    for one in asked:
        one.handle.cancel()
        one.wait()


def test_closing_lets_running_replies_finish_within_the_drain(make_service) -> None:
    tiny = make_service()
    asked = tiny.ask("x", max_tokens=30, ignore_eos=True)
    tiny.service.close(drain_s=60)
    assert asked.wait().finish is FinishReason.LENGTH
    with pytest.raises(Overloaded, match="shutting down"):
        tiny.ask("y")


def test_closing_at_once_cancels(make_service) -> None:
    tiny = make_service()
    asked = tiny.ask("x", max_tokens=390, ignore_eos=True)
    tiny.service.close()
    assert asked.wait().finish is FinishReason.CANCELLED


def test_an_idle_engine_does_not_wake_up(make_service) -> None:
    tiny = make_service()
    tiny.ask("x", max_tokens=2).wait()
    settled(tiny)
    turned = tiny.service._turned
    threading.Event().wait(0.3)
    assert tiny.service._turned == turned
