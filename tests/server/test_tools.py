"""Tools, thinking and formats over a real socket: what a stream adds up to, what the openai package makes of it, and
which requests are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import openai
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxpaged.sched.requests import FinishReason
from tests.chat.replies import HERMES, NOW, WEATHER
from tests.scripted import CHATML, ByteTokenizer, ScriptedService, says, with_logprobs
from tests.server.conftest import Running, running_server

ASK = [{"role": "user", "content": "Weather in Paris?"}]
THINKER = CHATML + "{# <think></think> #}"
"""A template without tools of a model that thinks."""


def asking_for_a_set(**more: Any) -> dict[str, Any]:
    """A tool whose schema demands what no grammar enforces."""
    days = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    return {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"days": days}}, **more},
    }


class Script:
    """What the next replies say, in pieces."""

    def __init__(self) -> None:
        self.pieces: Sequence[str] = ()
        self.finish = FinishReason.STOP

    def __call__(self, prompt_ids: Any, sampling: Any) -> Any:
        deltas = says(*self.pieces, finish=self.finish)
        return with_logprobs(deltas) if sampling.logprobs is not None else deltas

    def says(self, *pieces: str, finish: FinishReason = FinishReason.STOP) -> None:
        self.pieces, self.finish = pieces, finish


SCRIPT = Script()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(ScriptedService(SCRIPT, tokenizer=ByteTokenizer(chat_template=THINKER))) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        yield client


def whole(server: Running, **fields: Any) -> dict[str, Any]:
    answer = server.http.post("/v1/chat/completions", json={"messages": ASK, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def added_up(server: Running, **fields: Any) -> dict[str, Any]:
    """A stream put together as the package's users do: one choice in the shape of a whole answer."""
    body = {"messages": ASK, "stream": True, "stream_options": {"include_usage": True}, **fields}
    content = server.http.post("/v1/chat/completions", json=body).content
    events = [json.loads(part[6:]) for part in content.decode().split("\n\n") if part.startswith("data: {")]
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    entries, finish = [], None
    for choice in (event["choices"][0] for event in events if event["choices"]):
        delta = choice["delta"]
        assert len([key for key in delta if key != "role"]) <= 1
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append(call["function"])
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        entries += (choice["logprobs"] or {}).get("content") or []
        assert finish is None
        finish = choice["finish_reason"]
    return {"message": message, "finish_reason": finish, "logprobs": entries, "usage": events[-1]["usage"]}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.sampled_from(
        [
            f"<think>\nWéll, 🦙\n</think>\n\nLet me see. {HERMES}\n{HERMES}",
            "<think>so far</thi",
            HERMES[:60],
            "Plain a<b 日本 text\n",
            "<tool_call>no call</tool_call> é",
        ]
    ),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    fields=st.sampled_from([{}, {"tools": [WEATHER, NOW]}, {"tools": [WEATHER], "parallel_tool_calls": False}]),
    more=st.sampled_from([{}, {"logprobs": True}, {"reasoning_format": "none"}]),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_a_stream_adds_up_to_the_whole_answer(
    server: Running, text: str, cuts: list[int], fields: dict[str, Any], more: dict[str, Any], finish: FinishReason
) -> None:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    SCRIPT.says(text, finish=finish)
    answer = whole(server, **fields, **more)
    SCRIPT.says(*(text[start:end] for start, end in pairwise(places)), finish=finish)
    streamed, choice = added_up(server, **fields, **more), answer["choices"][0]
    message = choice["message"]
    assert streamed["message"] == {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": [call["function"] for call in message.get("tool_calls", ())],
    }
    assert streamed["finish_reason"] == choice["finish_reason"]
    assert streamed["logprobs"] == ((choice["logprobs"] or {}).get("content") or [])
    assert streamed["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"] == len(text.encode())
    if more.get("reasoning_format") != "none":
        assert "<think>" not in (message["content"] or "")


def test_thinking_is_told_apart_and_counted(server: Running) -> None:
    SCRIPT.says("<think>", "hm", "</think>", "yes")
    answer = whole(server)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>hm</think>")}


@pytest.mark.parametrize(
    ("choice", "finish"),
    [
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "weather"}}, "stop"),
    ],
)
def test_how_a_reply_with_a_call_ends(server: Running, choice: Any, finish: str) -> None:
    SCRIPT.says(HERMES)
    answer = whole(server, tools=[WEATHER], tool_choice=choice)["choices"][0]
    call = answer["message"]["tool_calls"][0]
    assert (answer["finish_reason"], answer["message"]["content"]) == (finish, None)
    assert call["type"] == "function" and call["id"].startswith("call_") and len(call["id"]) == 29
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "days": 3}
    assert (server.service.grammars[-1] is None) == (choice == "auto")


def test_the_prompt_tells_the_tools_unless_none_may_be_called(server: Running) -> None:
    SCRIPT.says("ok")
    counts = [
        whole(server, tools=[WEATHER], tool_choice=choice)["usage"]["prompt_tokens"] for choice in ("auto", "none")
    ]
    assert counts[0] > counts[1] == whole(server)["usage"]["prompt_tokens"]


def test_stop_strings_count_in_the_answer_only_and_one_call_ends_at_its_tag(server: Running) -> None:
    SCRIPT.says("ok")
    whole(server, stop="b", tools=[WEATHER], parallel_tool_calls=False)
    sampling = server.service.submitted[-1][1]
    assert sampling.stop == ("b", "</tool_call>")
    assert (sampling.stop_until, sampling.stop_after) == (tuple(b"<think>"), tuple(b"</think>"))


CLOSED = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"


def test_thinking_can_be_switched_off_and_the_prompt_may_open_it() -> None:
    service = ScriptedService(SCRIPT, tokenizer=ByteTokenizer(chat_template=CHATML + CLOSED))
    with running_server(service) as server:
        SCRIPT.says("hm</think>yes")
        assert whole(server)["choices"][0]["message"]["reasoning_content"] == "hm"
        SCRIPT.says("yes")
        for fields in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
            message = whole(server, **fields)["choices"][0]["message"]
            assert message["content"] == "yes" and "reasoning_content" not in message
            assert server.service.submitted[-1][1].stop_after == ()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]", "name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]", "a b"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "more than once"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice", "must be"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "rain"}}},
            "tool_choice",
            "'rain'; tools has weather",
        ),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}},
            "response_format",
            "Invalid type: objekt",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/nope"}}}},
            "response_format",
            "does not exist",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}}},
            "response_format",
            "unclosed group",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"not": {}}}}}},
            "response_format",
            'uses "not" at items, which cannot be enforced',
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"oneOf": [{}, {"minimum": 1}]}}}},
            "response_format",
            'uses "oneOf", and a value may fit its branches 0 and 1 at once',
        ),
        (
            {"tools": [asking_for_a_set(strict=True)]},
            "tools[0].function.parameters",
            'uses "uniqueItems" at properties.days, which cannot be enforced',
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
                "tool_choice": "required",
            },
            "tools",
            "must be an object",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_a_400_with_the_reason(
    server: Running, stream: bool, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = server.http.post("/v1/chat/completions", json={"messages": ASK, "stream": stream, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and words in answer.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_that_is_not_strict_may_have_any_schema(server: Running, choice: str) -> None:
    SCRIPT.says('<tool_call>\n{"name": "f", "arguments": {"days": [1, 2]}}\n</tool_call>')
    answer = whole(server, tools=[asking_for_a_set(strict=False)], tool_choice=choice)["choices"][0]
    assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]) == {"days": [1, 2]}


class Forecast(pydantic.BaseModel):
    """A forecast."""

    city: str
    days: int


def test_the_package_s_tool_helper_reads_a_stream(client: openai.OpenAI) -> None:
    SCRIPT.says(*"<think>hm</think>\nLet me see.\n" + HERMES, *HERMES)
    with client.chat.completions.stream(
        model="scripted", messages=ASK, tools=[openai.pydantic_function_tool(Forecast, name="weather")]
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done", "content.done"} <= kinds
    assert final.finish_reason == "tool_calls" and final.message.content == "Let me see."
    assert final.message.tool_calls is not None
    parsed = [call.function.parsed_arguments for call in final.message.tool_calls]
    assert parsed == [Forecast(city="Paris", days=3)] * 2
    assert len({call.id for call in final.message.tool_calls}) == 2


def test_the_package_s_parser_reads_an_answer_by_schema(client: openai.OpenAI) -> None:
    SCRIPT.says('<think>hm</think>\n{"city": "Paris", "days": 3}')
    answer = client.chat.completions.parse(model="scripted", messages=ASK, response_format=Forecast)
    assert answer.choices[0].message.parsed == Forecast(city="Paris", days=3)
    with client.chat.completions.stream(model="scripted", messages=ASK, response_format=Forecast) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Forecast(city="Paris", days=3)


def test_a_conversation_with_calls_and_results_can_be_sent_back(client: openai.OpenAI) -> None:
    SCRIPT.says(HERMES)
    tools: Any = [WEATHER]
    message = client.chat.completions.create(model="scripted", messages=ASK, tools=tools).choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    SCRIPT.says("It is sunny.")
    history: Any = [*ASK, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model="scripted", messages=history, tools=tools)
    assert answer.choices[0].message.content == "It is sunny."
    assert answer.choices[0].finish_reason == "stop"
