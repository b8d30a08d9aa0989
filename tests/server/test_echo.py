"""Completions that tell their prompt back, with its logprobs: the path by which evaluations read loglikelihoods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from mlxpaged.engine.events import Delta
from mlxpaged.sched.requests import SamplingParams, TokenLogprob
from tests.engine.conftest import TinyService, make_service
from tests.model.families import tiny_model
from tests.scripted import BOS, ScriptedService, says, with_logprobs
from tests.server.conftest import Running, Serve, running_server

__all__ = ["make_service"]  # the fixture that `tiny` asks for


def scored(prompt_ids: Sequence[int], sampling: SamplingParams) -> list[Delta]:
    """Says "ok"; the prompt's ids have -1, -2, ... and the letter x as the alternative."""
    top = ((ord("x"), -0.25),)[: sampling.prompt_logprobs]
    entries = [TokenLogprob(token, -float(place), top) for place, token in enumerate(prompt_ids) if place]
    half = len(entries) // 2
    told = [Delta(prompt_logprobs=tuple(entries[:half])), Delta(prompt_logprobs=tuple(entries[half:]))]
    said = says() if sampling.max_tokens == 0 else with_logprobs(says("o", "k"), 1)
    return (told if sampling.prompt_logprobs is not None else []) + said


def complete(server: Running, **body: Any) -> dict[str, Any]:
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server: Running, **body: Any) -> list[dict[str, Any]]:
    text = server.http.post("/v1/completions", json={**body, "stream": True}).text
    return [msgspec.json.decode(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_the_prompts_ids_come_first_and_the_first_has_no_logprob(serve: Serve) -> None:
    choice = complete(serve(ScriptedService(scored)), prompt=[97, 98, 99], echo=True, logprobs=1)["choices"][0]
    assert choice["text"] == "abcok"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "o", "k"],
        "token_logprobs": [None, -1.0, -2.0, -0.5, -0.5],
        "top_logprobs": [
            None,
            {"b": -1.0, "x": -0.25},
            {"c": -2.0, "x": -0.25},
            {"o": -0.5, "a": -1.0},
            {"k": -0.5, "a": -1.0},
        ],
        "text_offset": [0, 1, 2, 3, 4],
    }


def test_a_bos_id_that_the_text_does_not_show_has_no_width(serve: Serve) -> None:
    server = serve(ScriptedService(scored))
    choice = complete(server, prompt="é!", echo=True, logprobs=0)["choices"][0]
    assert server.service.submitted[0][0][0] == BOS
    assert choice["text"] == "é!ok"
    assert choice["logprobs"]["tokens"] == ["<s>", "bytes:\\xc3", "bytes:\\xa9", "!", "o", "k"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 2, 3]
    assert choice["logprobs"]["top_logprobs"][1] == {"bytes:\\xc3": -1.0}


def test_a_stream_tells_the_prompt_in_one_chunk_before_the_reply(serve: Serve) -> None:
    server = serve(ScriptedService(scored))
    whole = complete(server, prompt=["abc", [100]], n=2, echo=True, logprobs=1)["choices"]
    chunks = streamed(server, prompt=["abc", [100]], n=2, echo=True, logprobs=1)
    for index in range(4):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == whole[index]["text"]
        for name, values in whole[index]["logprobs"].items():
            assert [value for choice in own if choice["logprobs"] for value in choice["logprobs"][name]] == values
        assert own[0]["text"] == ("abc" if index < 2 else "d") and own[-1]["finish_reason"] == "stop"


def test_no_tokens_asked_for_is_the_prompt_alone(serve: Serve) -> None:
    server = serve(ScriptedService(scored))
    answer = complete(server, prompt="ab", max_tokens=0, echo=True, logprobs=1)
    assert answer["choices"][0]["text"] == "ab" and answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert server.service.submitted[0][1].max_tokens == 0
    texts = [
        chunk["choices"][0]["text"] for chunk in streamed(server, prompt="ab", max_tokens=0, echo=True, logprobs=1)
    ]
    assert texts == ["ab", ""]
    assert server.http.post("/v1/chat/completions", json={"messages": [], "max_tokens": 0}).status_code == 400


def test_without_logprobs_the_prompt_is_not_scored(serve: Serve) -> None:
    server = serve(ScriptedService(scored))
    assert complete(server, prompt="ab", echo=True)["choices"][0]["text"] == "abok"
    assert complete(server, prompt="ab", logprobs=1)["choices"][0]["logprobs"]["tokens"] == ["o", "k"]
    assert [sampling.prompt_logprobs for _, sampling in server.service.submitted] == [None, None]


@pytest.fixture
def tiny(make_service: Callable[..., TinyService]) -> Iterator[Running]:
    with running_server(make_service(num_blocks=300, max_rows=8).service) as running:
        yield running


def loglikelihoods(server: Running, cases: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
    """What lm-eval's local-completions computes: token-id prompts in a batch, echo, one token more, and of each the sum
    over the continuation and whether it is the greedy one."""
    found = []
    for start in range(0, len(cases), 10):
        batch = cases[start : start + 10]
        body = {"model": "default", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        answer = server.http.post("/v1/completions", json={**body, "prompt": [ids for ids, _ in batch]}, timeout=120)
        assert answer.status_code == 200, answer.text
        for choice, (_, context_len) in zip(answer.json()["choices"], batch, strict=True):
            lists = choice["logprobs"]
            total = sum(lists["token_logprobs"][context_len:-1])
            best = [max(top, key=top.get) for top in lists["top_logprobs"][context_len:-1]]
            found.append((total, best == lists["tokens"][context_len:-1]))
    return found


def stock_loglikelihoods(model: Any, cases: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
    found = []
    for ids, context_len in cases:
        logits = model(mx.array([ids]))[0].astype(mx.float32)
        logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        places = range(context_len - 1, len(ids) - 1)
        total = sum(float(logprobs[place, ids[place + 1]]) for place in places)
        found.append((total, all(int(logprobs[place].argmax()) == ids[place + 1] for place in places)))
    return found


def assert_equal(ours: list[tuple[float, bool]], stock: list[tuple[float, bool]]) -> None:
    assert len(ours) == len(stock) == 30
    for number, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
        assert abs(mine[0] - theirs[0]) < 1e-3, (number, mine, theirs)
        assert mine[1] == theirs[1], (number, mine, theirs)


def test_thirty_loglikelihoods_equal_stock_mlx_lm(tiny: Running) -> None:
    noise = np.random.default_rng(5)
    cases = [
        (noise.integers(0, 256, length).tolist(), int(noise.integers(1, length - 1)))
        for length in noise.integers(3, 150, 30).tolist()
    ]
    stock = stock_loglikelihoods(tiny_model("llama", vocab_size=258)[0], cases)
    assert_equal(loglikelihoods(tiny, cases), stock)


@pytest.mark.smollm2
def test_thirty_loglikelihoods_of_smollm2_equal_stock_mlx_lm(smollm2, make_service, monkeypatch) -> None:
    """Contexts and continuations as an evaluation has them; the greedy continuation is among them."""
    from mlxpaged.engine import host

    contexts = ["The capital of France is", "Water boils at", "Q: What do bees make?\nA:", "2 + 2 ="]
    contexts += ["The opposite of hot is", "def add(a, b):\n    return"]
    ends = [" Paris.", " 100 degrees", " honey", " 4", " cold"]
    encode = smollm2.tokenizer.encode
    cases = [(encode(context) + encode(end), len(encode(context))) for context in contexts for end in ends]
    stock = stock_loglikelihoods(smollm2.model, cases)
    tiny = make_service(num_blocks=200)
    monkeypatch.setattr(host, "load", lambda *_: smollm2)
    tiny.service.load("smollm2").result(120)
    with running_server(tiny.service) as server:
        assert_equal(loglikelihoods(server, cases), stock)
    assert any(greedy for _, greedy in stock) and not all(greedy for _, greedy in stock)
