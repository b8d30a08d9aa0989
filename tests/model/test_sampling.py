"""Sampling, effect by effect, on logits chosen so that the answer is known."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.kernels.noise import host_gumbel
from mlxpaged.model.drawing import HIDDEN, KernelDraw, PlainDraw, Wishes, gumbel, noise_keys
from mlxpaged.model.hostdrawing import host_draw
from mlxpaged.model.sampling import Sampler
from mlxpaged.sched.requests import Request, SamplingParams, StepPlan
from mlxpaged.sched.table import RequestTable
from tests.emulator import EmulatorLauncher
from tests.emulator.machine import FORWARD

VOCAB = 50

DRAWS = (host_draw, PlainDraw(), KernelDraw(EmulatorLauncher(passes=(FORWARD,))))


def sample(
    logits: np.ndarray,
    params: list[SamplingParams],
    *,
    prompts: list[list[int]] | None = None,
    position: int = 0,
    sampler: Sampler | None = None,
    allowed: np.ndarray | None = None,
    ends: frozenset[int] = frozenset(),
):
    """One step over len(params) rows with one-token prompts (or `prompts`), each sampling after `position`."""
    rows = len(params)
    table = RequestTable(rows, 4096)
    for index, sampling in enumerate(params):
        prompt = np.asarray((prompts or [[0]] * rows)[index], np.int32)
        row = table.assign(Request(index, prompt, sampling, ends), prompt, index, 4096)
        assert row == index
    positions = np.array([len((prompts or [[0]] * rows)[i]) - 1 for i in range(rows)], np.int32) + position
    plan = StepPlan(0, np.arange(rows, dtype=np.int32), positions, np.zeros(rows, bool))
    samplers = [sampler] if sampler else [Sampler(rows, logits.shape[-1], draw) for draw in DRAWS]
    given = (mx.array(logits, mx.float32), plan, table, None if allowed is None else mx.array(allowed))
    drawn = [sampler(*given) for sampler in samplers]
    # A GPU's ways, our kernels and sorted logits in a compiled graph, give the same ids.
    assert all(np.array_equal(np.array(one.tokens), np.array(drawn[0].tokens)) for one in drawn)
    asked = table.logprobs[plan.decode_rows]
    return drawn[0].result(asked[asked >= 0])


def draws(logits: np.ndarray, params: SamplingParams, count: int = 400) -> np.ndarray:
    """`count` ids of the same row under as many seeds."""
    many = [
        SamplingParams(**{**{f: getattr(params, f) for f in params.__slots__}, "seed": seed}) for seed in range(count)
    ]
    return sample(np.tile(logits, (count, 1)), many).token_ids


@pytest.fixture
def slope() -> np.ndarray:
    """Logits that fall by 0.2 an id: id 0 is the best."""
    return -0.2 * np.arange(VOCAB, dtype=np.float32)


def test_temperature_zero_takes_the_best_and_neutral_filters_change_nothing(slope) -> None:
    greedy = SamplingParams(top_k=3, top_p=0.5, min_p=0.1)
    assert sample(slope[None], [greedy]).token_ids.tolist() == [0]


def test_draws_follow_the_softmax(slope) -> None:
    drawn = draws(slope, SamplingParams(temperature=1.0), 4000)
    expected = np.exp(slope) / np.exp(slope).sum()
    found = np.bincount(drawn, minlength=VOCAB) / len(drawn)
    assert np.abs(found - expected).max() < 0.02


def test_top_k_keeps_exactly_k(slope) -> None:
    assert set(draws(slope, SamplingParams(temperature=5.0, top_k=4)).tolist()) == {0, 1, 2, 3}


def test_top_k_above_the_vocabulary_is_no_filter(slope) -> None:
    free = draws(slope, SamplingParams(temperature=1.0))
    assert draws(slope, SamplingParams(temperature=1.0, top_k=VOCAB * 100)).tolist() == free.tolist()


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert set(draws(logits, SamplingParams(temperature=1.0, top_p=0.79)).tolist()) == {0, 1}
    assert set(draws(logits, SamplingParams(temperature=1.0, top_p=0.81)).tolist()) == {0, 1, 2}
    assert set(draws(logits, SamplingParams(temperature=1.0, top_p=1e-6)).tolist()) == {0}


def test_top_p_counts_the_mass_that_top_k_leaves() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # Of the three best, 0.4 / 0.9 and 0.3 / 0.9 reach 0.75 together.
    assert set(draws(logits, SamplingParams(temperature=1.0, top_k=3, top_p=0.75)).tolist()) == {0, 1}


def test_top_p_beyond_the_1024_best_sorts_everything() -> None:
    logits = np.zeros(5000, np.float32)
    logits[:2500] = 0.001  # nearly flat: the 1024 best hold a fifth of the mass
    drawn = draws(logits, SamplingParams(temperature=1.0, top_p=0.5), 300)
    assert drawn.max() < 2500 and len(set(drawn.tolist())) > 200


def test_a_cpu_draws_as_a_gpu_does_whatever_is_asked_for() -> None:
    rng, rows = np.random.default_rng(0), 240
    kinds = np.arange(rows)
    wishes = Wishes(
        temperature=rng.uniform(0.2, 2, rows).astype(np.float32),
        min_p=np.where(kinds % 3 == 0, 0.02, 0).astype(np.float32),
        top_k=np.where(kinds % 5 == 0, rng.integers(1, 3000, rows), 0).astype(np.int32),
        top_p=np.where(kinds % 4 < 2, rng.uniform(0.05, 1, rows), 1).astype(np.float32),
        noise=noise_keys(rng.integers(0, 1 << 60, rows), np.zeros(rows, np.int64), kinds),
    )
    logits = rng.standard_normal((rows, 3000)).astype(np.float32) * rng.uniform(0.1, 6, (rows, 1)).astype(np.float32)
    logits[::7, :2990] = HIDDEN  # as a grammar leaves them
    host, *others = (np.array(draw(mx.array(logits), wishes)) for draw in DRAWS)
    assert all((host != other).sum() <= 1 for other in others)  # at a share that equals top-p but for its last bits


def test_the_noise_of_some_ids_is_theirs_among_all() -> None:
    keys, ids = noise_keys(np.array([9], np.uint64), np.array([2]), np.array([77])), np.array([0, 5, 63, 1999])
    all_of_it = np.array(gumbel(mx.array(keys[:, :1]), mx.array(keys[:, 1:]), 2000))[0]
    np.testing.assert_allclose(host_gumbel(keys[0], ids), all_of_it[ids], rtol=1e-4, atol=1e-5)


def test_min_p_is_relative_to_the_best() -> None:
    logits = np.log(np.array([0.5, 0.26, 0.24], np.float32))
    assert set(draws(logits, SamplingParams(temperature=1.0, min_p=0.5)).tolist()) == {0, 1}


def test_logit_bias_can_force_and_forbid(slope) -> None:
    assert sample(slope[None], [SamplingParams(logit_bias=((7, 100.0),))]).token_ids[0] == 7
    assert sample(slope[None], [SamplingParams(logit_bias=((0, -100.0), (1, -100.0)))]).token_ids[0] == 2


def test_allowed_ids_restrict_every_choice(slope) -> None:
    allowed = np.zeros((2, VOCAB), bool)
    allowed[:, [9, 11]] = True
    params = [SamplingParams(), SamplingParams(temperature=3.0, seed=1)]
    assert set(sample(np.tile(slope, (2, 1)), params, allowed=allowed).token_ids.tolist()) <= {9, 11}


def test_the_noise_depends_on_seed_choice_and_position_alone() -> None:
    seeds, choices, places = np.array([1, 1, 1, 2], np.uint64), np.array([0, 1, 0, 0]), np.array([5, 5, 6, 5])
    keys = noise_keys(seeds, choices, places)
    assert len({row.tobytes() for row in keys}) == 4
    rows = np.array(gumbel(mx.array(keys[:, :1]), mx.array(keys[:, 1:]), 64))
    assert len({row.tobytes() for row in rows}) == 4
    alone = noise_keys(seeds[1:2], choices[1:2], places[1:2])
    assert np.array_equal(np.array(gumbel(mx.array(alone[:, :1]), mx.array(alone[:, 1:]), 64))[0], rows[1])


def test_the_noise_is_gumbels_over_ids_and_over_positions() -> None:
    """Mean 0.5772 and variance pi^2 / 6, no id favoured, and neighbours in id or position unlike each other."""
    count, vocab = 256, 2048
    keys = noise_keys(np.full(count, 7, np.uint64), np.zeros(count, np.int64), np.arange(count))
    noise = np.array(gumbel(mx.array(keys[:, :1]), mx.array(keys[:, 1:]), vocab))
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - 0.57722) < 0.01 and abs(noise.var() - np.pi**2 / 6) < 0.02
    for axis, samples in ((0, count), (1, vocab)):
        spread = noise.mean(axis=axis).std() * np.sqrt(samples) / noise.std()
        assert 0.9 < spread < 1.1, f"means along axis {axis} spread {spread} times what chance gives"
    assert abs(np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(noise[:, :-1].ravel(), noise[:, 1:].ravel())[0, 1]) < 0.01
    won = np.bincount(noise.argmax(axis=1), minlength=vocab)
    assert won.max() <= 4  # 256 draws over 2048 ids


def test_a_row_draws_the_same_id_beside_any_neighbours(slope) -> None:
    mine = SamplingParams(temperature=1.0, top_p=0.9, seed=42)
    others = [
        SamplingParams(temperature=2.0, top_k=3, seed=1, logit_bias=((4, 5.0),)),
        SamplingParams(),
        SamplingParams(temperature=0.7, repetition_penalty=1.3, seed=3, logprobs=2),
    ]
    alone = sample(slope[None], [mine]).token_ids[0]
    for place in range(4):
        batch = [*others[:place], mine, *others[place:]]
        assert sample(np.tile(slope, (4, 1)), batch).token_ids[place] == alone


def test_repetition_penalty_counts_prompt_and_reply() -> None:
    logits = np.array([[2.0, 1.9, -1.0, -1.1]], np.float32)
    assert sample(logits, [SamplingParams(repetition_penalty=1.5)], prompts=[[0]]).token_ids[0] == 1
    negative = np.array([[-1.0, -1.1, -3.0, -3.0]], np.float32)
    assert sample(negative, [SamplingParams(repetition_penalty=1.5)], prompts=[[0]]).token_ids[0] == 1


def test_presence_and_frequency_count_the_reply_only() -> None:
    table = RequestTable(1, 64)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.3)
    table.assign(Request(0, np.array([0, 0, 0], np.int32), params), np.array([0, 0, 0], np.int32), 0, 64)
    sampler, logits = Sampler(1, 3), mx.array([[1.0, 0.4, 0.0]])
    tokens = []
    for step in range(4):
        plan = StepPlan(step, np.zeros(1, np.int32), np.array([2 + step], np.int32), np.zeros(1, bool))
        token = int(sampler(logits, plan, table).tokens[0])
        tokens.append(token)
        table.append(0, token)
    # 1.0 | 0.2 after one use | 0.4 of id 1 falls below | ... : worked out by hand
    assert tokens == [0, 1, 0, 2]


def test_counts_are_rebuilt_when_a_row_resumes() -> None:
    params = SamplingParams(frequency_penalty=2.0)
    logits = np.array([[1.0, 0.9, 0.0]], np.float32)
    request = Request(0, np.array([2], np.int32), params)
    table = RequestTable(1, 64)
    table.assign(request, np.array([2, 0, 1], np.int32), 0, 64)  # the prompt and two sampled ids
    plan = StepPlan(0, np.zeros(1, np.int32), np.array([2], np.int32), np.zeros(1, bool))
    assert int(Sampler(1, 3)(mx.array(logits), plan, table).tokens[0]) == 2


def test_end_ids_are_hidden_until_min_tokens(slope) -> None:
    few, enough = SamplingParams(min_tokens=3), SamplingParams(min_tokens=3)
    assert sample(slope[None], [few], position=1, ends=frozenset({0})).token_ids[0] == 1
    assert sample(slope[None], [enough], position=3, ends=frozenset({0})).token_ids[0] == 0


def test_logprobs_are_of_the_raw_distribution(slope) -> None:
    params = SamplingParams(temperature=0.1, top_k=1, logit_bias=((3, 100.0),), logprobs=2)
    result = sample(np.tile(slope, (2, 1)), [SamplingParams(), params])
    expected = slope - np.log(np.exp(slope).sum())
    assert result.logprobs is not None and result.logprobs[0] is None
    found = result.logprobs[1]
    assert found is not None and found.token_id == 3
    assert found.logprob == pytest.approx(expected[3], abs=1e-5)
    assert [token for token, _ in found.top] == [0, 1]
    assert found.top[0][1] == pytest.approx(expected[0], abs=1e-5)


def test_logprobs_of_a_penalised_row_are_raw_too_whatever_its_neighbours_ask_for(slope) -> None:
    penalised = SamplingParams(repetition_penalty=1.8, presence_penalty=1.0, logprobs=3)
    expected = slope - np.log(np.exp(slope).sum())
    for neighbour in (SamplingParams(), SamplingParams(logit_bias=((3, 1.0),)), SamplingParams(min_tokens=5)):
        result = sample(np.tile(slope, (2, 1)), [penalised, neighbour], prompts=[[1], [5]])
        assert result.logprobs is not None and (found := result.logprobs[0]) is not None
        assert [value for _, value in found.top] == pytest.approx(expected[:3].tolist(), abs=1e-5)
        assert found.logprob == pytest.approx(expected[found.token_id], abs=1e-5)


def test_logprobs_of_overflowed_logits_are_numbers() -> None:
    logits = np.full((1, 3), np.nan, np.float32)
    found = sample(logits, [SamplingParams(logprobs=2)]).logprobs
    assert found is not None and found[0] is not None
    assert found[0].logprob == -9999 and all(value == -9999 for _, value in found[0].top)


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"min_p": 0.1, "top_p": 0.5}])
def test_overflowed_logits_give_an_id_whatever_filters_them(filters) -> None:
    params = [SamplingParams(temperature=0.7, seed=seed, **filters) for seed in range(3)]
    logits = np.array([[np.nan] * 4, [0, 1, np.inf, 2], [-np.inf] * 4], np.float32)
    drawn = sample(logits, params).token_ids.tolist()
    assert drawn[0] == 0 and drawn[1] == 2 and 0 <= drawn[2] < 4
    allowed = np.array([[False, False, True, True]] * 2)
    assert sample(logits[[0, 0]], params[:2], allowed=allowed).token_ids.tolist() == [2, 2]


def test_end_ids_that_the_model_has_no_logit_for_hide_nothing(slope) -> None:
    rows, ends = [SamplingParams(min_tokens=9), SamplingParams()], frozenset({VOCAB, VOCAB + 1, 5 * VOCAB})
    assert sample(np.tile(slope, (2, 1)), rows, ends=ends).token_ids.tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 3e-39, 5e-324])
def test_a_temperature_next_to_zero_is_zero(slope, temperature) -> None:
    for filters in ({}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.5}):
        params = SamplingParams(temperature=temperature, seed=3, **filters)
        assert sample(np.flip(slope)[None] + 5, [params]).token_ids[0] == VOCAB - 1


def test_logprobs_of_a_masked_id_stay_finite() -> None:
    logits = np.array([[0.0, -np.inf, 0.0]], np.float32)
    found = sample(logits, [SamplingParams(logit_bias=((0, -100.0), (2, -100.0)), logprobs=3)]).logprobs
    assert found is not None and found[0] is not None
    assert all(np.isfinite(value) for _, value in found[0].top) and np.isfinite(found[0].logprob)
