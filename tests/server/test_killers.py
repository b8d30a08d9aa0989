"""Requests that are known to have killed, frozen or corrupted a server like this one, against the real engine; and
what must hold afterwards."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from mlxpaged.engine import host
from tests.engine.conftest import TinyService, make_service
from tests.server.conftest import Running, running_server

__all__ = ["make_service"]  # the fixture that the servers ask for

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def server(make_service: Callable[..., TinyService]) -> Iterator[Running]:
    with running_server(make_service(num_blocks=120, max_rows=8).service) as running:
        yield running


def post(server: Running, **body: Any) -> Any:
    return server.http.post("/v1/completions", json=body, timeout=120)


def text_of(server: Running, **body: Any) -> str:
    answer = post(server, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def settled(server: Running) -> dict[str, Any]:
    """The stats once nothing runs or waits; asking is what passes the time."""
    for _ in range(10_000):
        stats = server.http.get("/v1/kv").json()
        if stats["num_running"] == stats["num_waiting"] == stats["blocks_used"] == 0:
            return stats
    raise AssertionError(stats)


@pytest.mark.parametrize("top_k", [258, 259, 10**6, 2**31, 10**18])
def test_top_k_above_the_vocabulary_is_no_filter(server: Running, top_k: int) -> None:
    drawn = {"prompt": "abc", "max_tokens": 8, "temperature": 1, "seed": 1, "ignore_eos": True}
    assert text_of(server, **drawn, top_k=top_k) == text_of(server, **drawn, top_k=0)


@pytest.mark.parametrize("stop", [[1], [None], [["a"]], 1, {"a": 1}])
def test_a_stop_that_is_no_text_is_a_400_and_the_same_request_can_be_sent_again(server: Running, stop: Any) -> None:
    for _ in range(3):
        assert post(server, prompt="abc", stop=stop).status_code == 400
    assert text_of(server, prompt="abc", max_tokens=4, **GREEDY)


def test_every_nullable_field_may_be_null(server: Running) -> None:
    names = ["temperature", "max_tokens", "stream", "stop", "n", "seed", "top_p", "top_k", "logit_bias", "logprobs"]
    answer = post(server, prompt="abc", **dict.fromkeys(names))
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 16


def test_a_stop_string_cut_from_the_middle_ends_the_reply_where_it_begins(server: Running) -> None:
    """Taken from inside the text that generation would go on from, across two tokens and inside one."""
    whole = text_of(server, prompt="capital", max_tokens=40, **GREEDY)
    for start, size in [(10, 1), (10, 2), (11, 3), (17, 5)]:
        stop = whole[start : start + size]
        cut = whole.index(stop)
        for stream in (False, True):
            answer = post(server, prompt="capital", max_tokens=40, stop=[stop], stream=stream, **GREEDY)
            if stream:
                chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
                choices = [chunk["choices"][0] for chunk in chunks]
                text, finish = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
            else:
                text, finish = answer.json()["choices"][0]["text"], answer.json()["choices"][0]["finish_reason"]
            assert (text, finish) == (whole[:cut], "stop")
    assert settled(server)["blocks_used"] == 0


def test_plain_rows_beside_rows_with_penalties_and_biases_say_what_they_say_alone(server: Running) -> None:
    plain = [{"prompt": letter * 9, "max_tokens": 24, **GREEDY} for letter in "abcd"]
    bent = [
        {"prompt": "eee", "max_tokens": 24, **GREEDY, "repetition_penalty": 1.8},
        {"prompt": "fff", "max_tokens": 24, **GREEDY, "presence_penalty": 2, "frequency_penalty": -2},
        {"prompt": "ggg", "max_tokens": 24, **GREEDY, "logit_bias": {"65": 100, "66": -100}},
        {"prompt": "hhh", "max_tokens": 24, "temperature": 1.5, "seed": 3, "top_p": 0.3, "min_p": 0.1},
    ]
    alone = [text_of(server, **body) for body in plain + bent]
    assert alone[6] == "A" * 24
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda body: text_of(server, **body), plain + bent)) == alone


def test_a_long_prompt_does_not_freeze_a_running_stream(
    make_service: Callable[..., TinyService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1500 tokens at 64 a step are 24 steps: the stream says something in nearly every one of them."""
    tiny = make_service(num_blocks=300, max_rows=4, step_budget=64)
    read = host.load
    monkeypatch.setattr(host, "load", lambda *given: replace(read(*given), context_len=2000))
    tiny.service.load("longer").result(60)
    with running_server(tiny.service) as server, ThreadPoolExecutor(1) as pool:
        reading = threading.Event()

        def ask_long() -> int:
            assert reading.wait(60)
            answer = post(server, prompt=[7] * 1500, max_tokens=1, **GREEDY)
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["prompt_tokens"]

        asked = pool.submit(ask_long)
        body = {"prompt": "abc", "max_tokens": 300, "stream": True, "return_token_ids": True, **GREEDY}
        during = 0
        with server.http.stream("POST", "/v1/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if '"token_ids"' in line:
                    during += reading.is_set() and not asked.done()
                    reading.set()
        assert asked.result() == 1500
    assert during >= 20


def test_64_requests_on_a_tiny_pool_are_all_answered_as_each_would_be_alone(
    make_service: Callable[..., TinyService],
) -> None:
    tiny = make_service(num_blocks=16, max_rows=16)  # 15 blocks: 240 tokens for 64 replies of up to 90
    with running_server(tiny.service) as server:
        bodies = [{"prompt": chr(97 + number % 26) * (1 + number), "max_tokens": 26, **GREEDY} for number in range(64)]
        with ThreadPoolExecutor(64) as pool:
            answers = list(pool.map(lambda body: post(server, **body), bodies))
        assert [answer.status_code for answer in answers] == [200] * 64
        assert all(answer.json()["usage"]["completion_tokens"] == 26 for answer in answers)
        assert settled(server)["preemptions"] > 0
        for number in (0, 20, 41, 63):
            assert text_of(server, **bodies[number]) == answers[number].json()["choices"][0]["text"]


def test_n_choices_compute_their_prompt_once_and_count_it_once(server: Running) -> None:
    before = settled(server)
    answer = post(server, prompt="y" * 150, n=4, temperature=1, seed=2, max_tokens=4, ignore_eos=True).json()
    after = settled(server)
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    assert answer["usage"]["prompt_tokens"] == 150 and answer["usage"]["completion_tokens"] == 16
    computed = (after["prompt_tokens"] - after["cached_tokens"]) - (before["prompt_tokens"] - before["cached_tokens"])
    assert computed <= 150 + 3 * 16, "each further choice recomputes less than a block"


def test_the_progress_of_a_prompt_is_told_on_request(server: Running) -> None:
    body = {"prompt": [5] * 300, "max_tokens": 1, "stream": True, "return_progress": True, **GREEDY}
    lines = post(server, **body).text.splitlines()
    told = [json.loads(line[6:])["prompt_progress"] for line in lines if "prompt_progress" in line]
    assert [step["processed"] for step in told] == sorted({step["processed"] for step in told})
    assert {step["total"] for step in told} == {300} and told[-1]["processed"] == 299 and len(told) >= 4
    assert "prompt_progress" not in post(server, **(body | {"return_progress": None})).text


def test_a_failing_step_ends_its_requests_alone_and_the_same_request_can_be_sent_again(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = text_of(server, prompt="abc", max_tokens=6, **GREEDY)
    runner = server.service._host.core.runner
    launch, failing = runner.launch, [True]

    def broken(*given: Any) -> Any:
        if failing:
            failing.pop()
            raise RuntimeError("out of memory")
        return launch(*given)

    monkeypatch.setattr(runner, "launch", broken)
    answer = post(server, prompt="abc", max_tokens=6, **GREEDY)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert "out of memory" in answer.json()["error"]["message"]
    assert text_of(server, prompt="abc", max_tokens=6, **GREEDY) == expected
    assert settled(server)["blocks_used"] == 0


def test_a_storm_of_wrong_requests_changes_nothing_for_those_that_are_right(server: Running) -> None:
    expected = text_of(server, prompt="right", max_tokens=20, **GREEDY)
    wrong: list[dict[str, Any]] = [
        {"prompt": [999]},
        {"prompt": "a", "logit_bias": {"9999": 1}},
        {"prompt": "a", "temperature": -1},
        {"prompt": "a" * 5000},
        {"prompt": "a", "stop_token_ids": [-5]},
        {"prompt": {"a": 1}},
        {"prompt": "a", "n": 99},
        {"prompt": []},
    ]

    def ask(number: int) -> int:
        if number % 2:
            assert text_of(server, prompt="right", max_tokens=20, **GREEDY) == expected
            return 200
        return post(server, **wrong[number // 2 % len(wrong)]).status_code

    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(ask, range(64)))
    assert codes == [400, 200] * 32
