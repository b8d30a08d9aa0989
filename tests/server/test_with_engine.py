"""The real engine behind the real server, over a tiny model: the same text streamed and whole, two clients at once, a
storm of clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.engine.conftest import TinyService, make_service
from tests.server.conftest import Running, running_server

__all__ = ["make_service"]  # the fixture that `server` asks for

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture
def server(make_service: Callable[..., TinyService]) -> Iterator[Running]:
    tiny = make_service(num_blocks=120, max_rows=8)
    with running_server(tiny.service) as running:
        yield running


def complete(server: Running, prompt: Any, **fields: Any) -> dict[str, Any]:
    answer = server.http.post("/v1/completions", json={"prompt": prompt, **GREEDY, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def settled(server: Running) -> dict[str, Any]:
    """The stats once nothing runs or waits; asking is what passes the time."""
    for _ in range(10_000):
        stats = server.http.get("/v1/kv").json()
        if stats["num_running"] == stats["num_waiting"] == stats["blocks_used"] == 0:
            return stats
    raise AssertionError(stats)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2},
        {"stop": ["\ufffd"]},
        {"temperature": 1, "seed": 3},
        {"temperature": 1, "top_k": 10**9, "seed": 4},
    ],
    ids=["greedy", "logprobs", "stop string", "seeded", "top_k above the vocabulary"],
)
def test_a_stream_adds_up_to_the_whole_answer(server: Running, fields: dict[str, Any]) -> None:
    whole = complete(server, "hello", **fields)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=60) as client:
        extra = {"ignore_eos": True, **fields}
        options = {"include_usage": True}
        chunks = list(
            client.completions.create(
                model="tiny",
                prompt="hello",
                stream=True,
                extra_body={**GREEDY, **extra},
                stream_options=options,
            )
        )
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == whole["choices"][0]["text"]
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert finishes == [whole["choices"][0]["finish_reason"]]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole["usage"]["completion_tokens"]
    if "logprobs" in fields:
        lists = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
        tokens = [token for part in lists for token in part.tokens]
        assert tokens == whole["choices"][0]["logprobs"]["tokens"] and len(tokens) == 24
        offsets = [offset for part in lists for offset in part.text_offset]
        assert offsets == whole["choices"][0]["logprobs"]["text_offset"]


def test_a_second_request_with_the_same_prompt_reports_what_was_cached(server: Running) -> None:
    prompt = "the same three hundred bytes " * 10
    assert complete(server, prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    usage = complete(server, prompt)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= usage["prompt_tokens"] - 17
    assert settled(server)["hit_rate"] == cached / (2 * usage["prompt_tokens"])


def test_clients_at_once_get_what_each_would_get_alone(server: Running) -> None:
    prompts = [letter * (7 + 5 * index) for index, letter in enumerate("abcdef")]
    alone = [complete(server, prompt)["choices"][0]["text"] for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: complete(server, prompt)["choices"][0]["text"], prompts))
    assert together == alone


def test_choices_with_a_seed_differ_and_repeat(server: Running) -> None:
    fields = {"n": 3, "seed": 11, "temperature": 1}
    texts = [choice["text"] for choice in complete(server, "hello", **fields)["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["text"] for choice in complete(server, "hello", **fields)["choices"]]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": "x" * 1000}, "maximum context length"),
        ({"prompt": [258]}, "outside"),
        ({"prompt": "a", "logit_bias": {"258": 1}}, "logit_bias"),
        ({"prompt": "a", "stop_token_ids": [10**20]}, "stop_token_ids"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": "a", "stop": [1]}, "stop[0]"),
    ],
)
def test_what_the_engine_cannot_do_is_a_400(server: Running, fields: dict[str, Any], word: str) -> None:
    answer = server.http.post("/v1/completions", json={**fields, "stream": True})
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


def test_a_storm_of_clients_that_leave_frees_every_block_and_changes_no_answer(server: Running) -> None:
    before = complete(server, "calm")["choices"][0]["text"]

    async def visit(client: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": f"{number % 7} storm " * (1 + number % 20), **GREEDY, "max_tokens": 200}
        try:
            async with asyncio.timeout(0.01 * (number % 30)):
                async with client.stream("POST", "/v1/completions", json={**body, "stream": number % 2 == 0}) as answer:
                    async for _ in answer.aiter_raw():
                        if number % 3 == 0:
                            return
        except (TimeoutError, httpx.TransportError):
            return

    async def storm() -> None:
        limits = httpx.Limits(max_connections=60)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, limits=limits, timeout=60) as client:
            await asyncio.gather(*(visit(client, number) for number in range(60)))

    asyncio.run(storm())
    stats = settled(server)
    assert stats["blocks_cached"] + stats["blocks_free"] == stats["blocks_total"] == 119
    assert complete(server, "calm")["choices"][0]["text"] == before
