"""Logprobs of a prompt's own ids equal stock mlx-lm's, however the prompt is cut, found or interrupted."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.sched.requests import FinishReason

from .families import tiny_model
from .rig import Rig

CASES = 30


def stock_logprobs(model, ids: list[int]) -> np.ndarray:
    """float32 [len(ids) - 1, V]: after each id but the last, the distribution of the next, by one forward."""
    logits = model(mx.array([ids]))[0, :-1].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def assert_equal(entries, ids: list[int], expected: np.ndarray, top: int) -> None:
    assert [entry.token_id for entry in entries] == ids[1:]
    for place, entry in enumerate(entries):
        assert abs(entry.logprob - expected[place, entry.token_id]) < 1e-3, (place, entry)
        best = np.sort(expected[place])[::-1][:top]
        assert np.allclose([value for _, value in entry.top], best, atol=1e-3)


def prompts(vocab: int) -> list[list[int]]:
    noise = np.random.default_rng(3)
    return [noise.integers(0, vocab, length).tolist() for length in noise.integers(2, 120, CASES)]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma2"])
@pytest.mark.parametrize("budget", [16, 64])
def test_thirty_prompts_at_once_equal_stock(name: str, budget: int, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    model, config = tiny_model(name)
    cases = prompts(64)
    expected = [stock_logprobs(model, ids) for ids in cases]  # before the model is made to read the pool
    rig = Rig(model, config, step_budget=budget, num_blocks=400)
    assert rig.built.served_by == ("one at a time" if name == "gemma2" else "paged")
    for index, ids in enumerate(cases):
        rig.add(index, ids, max_tokens=index % 2, prompt_logprobs=index % 4)
    rig.run()
    for index, ids in enumerate(cases):
        assert_equal(rig.prompt_logprobs[index], ids, expected[index], index % 4)
        assert len(rig.replies.get(index, [])) == index % 2 and rig.ends[index] is FinishReason.LENGTH


def test_a_prompt_that_is_known_is_computed_again_and_scored_whole(llama) -> None:
    model, config = llama
    ids = prompts(64)[0] * 2
    expected = stock_logprobs(model, ids)
    rig = Rig(model, config)
    rig.add(1, ids, 1)
    rig.run()
    rig.add(2, ids, 0, prompt_logprobs=1)
    rig.add(3, ids, 1)
    rig.run()
    assert_equal(rig.prompt_logprobs[2], ids, expected, 1)
    assert rig.cached[3] == len(ids) - 1


def test_a_prompt_that_is_preempted_midway_is_scored_once(llama) -> None:
    model, config = llama
    ids = prompts(64)[1] * 3
    expected = stock_logprobs(model, ids)
    rig = Rig(model, config, step_budget=16)
    rig.add(1, ids, 2, prompt_logprobs=2)
    for _ in range(3):
        rig.step()
    assert 0 < len(rig.prompt_logprobs[1]) < len(ids) - 1
    for live in rig.core.scheduler.live():
        rig.core.scheduler.preempt(live)
    rig.run()
    assert_equal(rig.prompt_logprobs[1], ids, expected, 2)
    assert len(rig.replies[1]) == 2


def test_a_row_that_gives_way_while_its_last_chunk_is_in_flight_still_gets_its_scores(llama) -> None:
    model, config = llama
    ids = next(ids for ids in prompts(64) if 20 < len(ids) < 60)
    expected = stock_logprobs(model, ids)
    rig = Rig(model, config, ahead=1)
    rig.add(0, ids, 8, prompt_logprobs=0)
    rig.step()
    (live,) = rig.core.scheduler.live()
    assert live.in_flight
    rig.core.scheduler.preempt(live)
    rig.run()
    assert_equal(rig.prompt_logprobs[0], ids, expected, 0)
    assert len(rig.replies[0]) == 8


def test_the_logits_of_one_step_stay_within_their_budget(llama) -> None:
    model, config = llama
    rig = Rig(model, config, step_budget=64)
    rig.core.scheduler._prompts._score_budget = 5
    for index, ids in enumerate(prompts(64)[:4]):
        rig.add(index, ids, 0, prompt_logprobs=0)
    while not rig.core.idle:
        plan = rig.core.scheduler.schedule()
        assert plan is not None and sum(chunk.length for chunk in plan.chunks) <= 5
        rig.core.scheduler.commit(plan, rig.core.runner.launch(plan, rig.core.scheduler.table).wait())
        rig._take(rig.core.scheduler.take_events())
    assert [len(rig.prompt_logprobs[index]) for index in range(4)] == [len(ids) - 1 for ids in prompts(64)[:4]]


def test_no_tokens_asked_for_means_no_token_sampled_for_anyone_to_see(llama) -> None:
    rig = Rig(*llama)
    rig.add(1, [5], 0)
    rig.add(2, [5, 6, 7], 0, prompt_logprobs=3)
    rig.run()
    assert rig.replies == {} and rig.ends == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH}
    assert len(rig.prompt_logprobs[2]) == 2


@pytest.fixture
def llama(monkeypatch, tmp_path):
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    return tiny_model("llama")


@pytest.mark.smollm2
def test_loglikelihoods_of_thirty_texts_equal_stock(smollm2, monkeypatch, tmp_path) -> None:
    """The quantity an evaluation reads: the sum over the continuation's ids."""
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    words = ["Paris", "water", "a cat", "two", "blue", "the moon"]
    frames = ["The capital is {}.", "I would say {} and then", "Q: what?\nA: {}", "{}", "def {}(x):\n    return {}"]
    texts = [frame.format(*[word] * frame.count("{}")) for frame in frames for word in words]
    cases = [ids for text in texts if len(ids := smollm2.tokenizer.encode(text, add_special=True)) > 1]
    cases += [smollm2.tokenizer.encode(text * 4) for text in texts[: CASES - len(cases)]]
    expected = [stock_logprobs(smollm2.model, ids) for ids in cases]
    rig = Rig(smollm2.model, smollm2.config)
    for index, ids in enumerate(cases):
        rig.add(index, ids, 1, prompt_logprobs=1)
    rig.run()
    assert len(cases) == CASES
    for index, ids in enumerate(cases):
        theirs = sum(float(expected[index][place, ids[place + 1]]) for place in range(len(ids) - 1))
        ours = sum(entry.logprob for entry in rig.prompt_logprobs[index])
        assert abs(ours - theirs) < 1e-3, (index, ours, theirs)
