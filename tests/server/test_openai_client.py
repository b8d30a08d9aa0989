"""The openai package against the server: what its users see, and what its parser accepts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from mlxpaged.engine.events import Delta
from mlxpaged.sched.requests import FinishReason
from tests.scripted import ScriptedService, says, with_logprobs
from tests.server.conftest import Running, running_server

HELLO = [{"role": "user", "content": "hi"}]


def echo(prompt_ids, sampling):
    """Says the user's text back, letter by letter."""
    text = bytes(token_id for token_id in prompt_ids if token_id < 256).decode()
    said = text.removeprefix("user\n").partition("\n")[0] or "hello"
    deltas = says(*said, finish=FinishReason.STOP)
    return with_logprobs(deltas, sampling.logprobs) if sampling.logprobs is not None else deltas


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(ScriptedService(echo), aliases=("org/other",)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        yield client


def test_a_chat_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=HELLO)
    assert answer.choices[0].message.content == "hi"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (21, 2, 23)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("text", ["hi", "grüße", "日本語", "a\u2028b\x85c", "🦙🏽"])
def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    whole = client.chat.completions.create(model="scripted", messages=messages).choices[0].message.content
    chunks = list(client.chat.completions.create(model="scripted", messages=messages, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole == text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"


def test_the_stream_helper_accepts_every_chunk(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="scripted", messages=HELLO, n=2, logprobs=True, top_logprobs=2, stream_options={"include_usage": True}
    ) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["hi", "hi"]
    logprobs = final.choices[1].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["h", "i"]
    assert [[top.token for top in entry.top_logprobs] for entry in logprobs.content] == [["a", "b"], ["a", "b"]]
    assert final.usage is not None and final.usage.completion_tokens == 4


def test_logprobs_without_alternatives_have_an_empty_list(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=HELLO, logprobs=True)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    entry = answer.choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes, entry.logprob, entry.top_logprobs) == ("h", [104], -0.5, [])


def test_a_piece_of_a_character_is_spelled_out_with_its_exact_bytes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "é"}], logprobs=True
    )
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    entries = [(entry.token, entry.bytes) for entry in answer.choices[0].logprobs.content]
    assert entries == [("bytes:\\xc3", [0xC3]), ("bytes:\\xa9", [0xA9])]


def test_completions_take_texts_ids_and_batches(client: openai.OpenAI) -> None:
    for prompt, expected in [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ]:
        answer = client.completions.create(model="scripted", prompt=prompt)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))


def test_n_choices_of_each_prompt_are_prompt_major(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt=["a", "b"], n=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["aa", "aa", "bb", "bb"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 4)


def test_completion_logprobs_are_four_parallel_lists_with_character_offsets(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="aéb", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[1] == {"bytes:\\xc3": -0.5, "a": -1.0, "b": -2.0}
    chunks = list(client.completions.create(model="scripted", prompt="aéb", logprobs=2, stream=True))
    streamed = [
        offset for chunk in chunks if chunk.choices[0].logprobs for offset in chunk.choices[0].logprobs.text_offset
    ]
    assert streamed == [0, 1, 1, 2]


def test_minus_infinity_is_written_as_a_number() -> None:
    from mlxpaged.sched.requests import TokenLogprob

    never = Delta(text="a", token_ids=(97,), logprobs=(TokenLogprob(97, float("-inf"), ((98, float("-inf")),)),))
    with running_server(ScriptedService(lambda *_: [never, *says()])) as server:
        body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1}
        entry = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"][0]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted", "org/other"]
    assert client.models.retrieve("org/other").owned_by == "mlxpaged"


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (openai.BadRequestError, {"temperature": 3}),
        (openai.BadRequestError, {"extra_body": {"stop": [1]}}),
        (openai.NotFoundError, {"model": "absent"}),
    ],
)
def test_errors_become_the_packages_own_with_message_and_param(
    client: openai.OpenAI, error: type[openai.APIStatusError], fields: dict
) -> None:
    with pytest.raises(error) as raised:
        client.chat.completions.create(**{"model": "scripted", "messages": HELLO, "stream": True, **fields})
    assert raised.value.type in {"invalid_request_error", "not_found_error"}
    assert raised.value.body["message"]


def test_an_error_in_the_middle_of_a_stream_is_raised() -> None:
    script = says("Hel", finish=FinishReason.ERROR, error="step 3 failed")
    with (
        running_server(ScriptedService(lambda *_: script)) as server,
        openai.OpenAI(base_url=server.url, api_key="x", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="step 3 failed"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="step 3 failed") as raised:
            client.chat.completions.create(model="scripted", messages=HELLO)
        assert raised.value.response.headers["x-should-retry"] == "false"


def test_two_clients_get_their_own_answers_interleaved() -> None:
    """Each step gives either stream one letter, so that neither can be served after the other."""
    service = ScriptedService(echo, manual=True)

    async def read(url: str, text: str, letters: asyncio.Queue[str]) -> str:
        said = ""
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            messages = [{"role": "user", "content": text}]
            async for chunk in await client.chat.completions.create(model="scripted", messages=messages, stream=True):
                if letter := chunk.choices[0].delta.content:
                    said += letter
                    await letters.put(letter)
        return said

    async def both(url: str) -> tuple[list[str], list[set[str]]]:
        letters: asyncio.Queue[str] = asyncio.Queue()
        readers = [asyncio.create_task(read(url, text, letters)) for text in ("aaaa", "bbbb")]
        await asyncio.to_thread(service.wait_until, lambda stats: stats.num_running == 2)
        rounds = []
        for _ in range(4):
            service.step()
            rounds.append({await letters.get(), await letters.get()})
        service.step()
        return [await reader for reader in readers], rounds

    with running_server(service) as server:
        said, rounds = asyncio.run(both(server.url))
    assert said == ["aaaa", "bbbb"]
    assert rounds == [{"a", "b"}] * 4
