"""Anthropic's messages endpoint, byte for byte and in both directions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mlxpaged.engine.events import Delta
from mlxpaged.errors import BadParameter
from mlxpaged.sched.requests import FinishReason
from mlxpaged.server.anthropic_fields import MessagesRequest, chat_request
from tests.scripted import ScriptedService, says
from tests.server.conftest import Running, Serve

PATH = "/v1/messages"
HELLO = {"model": "scripted", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
WEATHER = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {"type": "object", "properties": {"city": {}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def events(server: Running, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of each event; every one must have both lines and nothing else."""
    answer = server.http.post(PATH, json={**body, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        found.append((name[7:], msgspec.json.decode(data[6:])))
    assert all(data["type"] == name for name, data in found)
    return found


def test_a_stream_opens_grows_and_closes_one_block(serve: Serve) -> None:
    told = events(serve(), HELLO)
    assert [name for name, _ in told] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = told[0][1]["message"]
    assert start["usage"]["input_tokens"] == 21 and start["content"] == [] and start["id"].startswith("msg_")
    assert told[1][1] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert told[2][1]["delta"] == {"type": "text_delta", "text": "Hel"}
    assert told[5][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert told[5][1]["usage"]["output_tokens"] == 5


def test_a_whole_answer_says_what_the_stream_says(serve: Serve) -> None:
    body = serve().http.post(PATH, json=HELLO).json()
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 21,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 5,
        },
    }


def test_the_cached_part_of_a_prompt_is_counted_apart(serve: Serve) -> None:
    service = ScriptedService()
    service.cached_tokens = 16
    usage = serve(service).http.post(PATH, json=HELLO).json()["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (5, 16)


@pytest.mark.parametrize(
    ("ending", "reason", "sequence"),
    [
        ({"finish": FinishReason.LENGTH}, "max_tokens", None),
        ({"stop_reason": "END"}, "stop_sequence", "END"),
        ({}, "end_turn", None),
    ],
)
def test_why_a_reply_ended(serve: Serve, ending: dict[str, Any], reason: str, sequence: str | None) -> None:
    server = serve(ScriptedService(lambda *_: says("a", **ending)))
    body = server.http.post(PATH, json={**HELLO, "stop_sequences": ["END"]}).json()
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    assert server.service.submitted[0][1].stop == ("END",)


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_a_tool_call_is_a_block_of_its_own_after_the_text(serve: Serve, cut: int) -> None:
    text = "I look.\n" + CALL
    script = says(*(text[start : start + cut] for start in range(0, len(text), cut)))
    server = serve(ScriptedService(lambda *_: script))
    body = {**HELLO, "tools": [WEATHER]}
    told = events(server, body)
    starts = [data["content_block"] for name, data in told if name == "content_block_start"]
    assert [block["type"] for block in starts] == ["text", "tool_use"]
    assert starts[1]["name"] == "weather" and starts[1]["input"] == {} and starts[1]["id"]
    pieces = [data["delta"]["partial_json"] for _, data in told if data.get("delta", {}).get("partial_json")]
    assert msgspec.json.decode("".join(pieces)) == {"city": "Paris"}
    order = [(name, data["index"]) for name, data in told if name.startswith("content_block_st")]
    assert order == [
        ("content_block_start", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_stop", 1),
    ]
    assert told[-2][1]["delta"]["stop_reason"] == "tool_use"
    whole = server.http.post(PATH, json=body).json()
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    assert whole["content"][0]["text"].strip() == "I look." and whole["content"][1]["input"] == {"city": "Paris"}


def test_count_tokens_counts_what_the_message_would_send_and_generates_nothing(serve: Serve) -> None:
    server = serve()
    counted = server.http.post(f"{PATH}/count_tokens", json=HELLO).json()
    assert server.service.submitted == [] and counted == {"input_tokens": 21}
    assert server.http.post(f"{PATH}?beta=true", json=HELLO).json()["usage"]["input_tokens"] == 21
    more = server.http.post(f"{PATH}/count_tokens", json={**HELLO, "system": "Be brief."}).json()
    assert more["input_tokens"] > 21


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({**HELLO, "messages": []}, 400, "invalid_request_error"),
        ({**HELLO, "messages": "hi"}, 400, "invalid_request_error"),
        ({**HELLO, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, None),
        ({**HELLO, "messages": [{"role": "king", "content": "x"}]}, 400, None),
        ({**HELLO, "temperature": 3}, 400, None),
        ({**HELLO, "tool_choice": {"type": "sometimes"}}, 400, None),
        ({**HELLO, "tool_choice": {"type": "any"}}, 400, None),
        ({**HELLO, "model": "claude-unknown"}, 404, "not_found_error"),
        ({**HELLO, "messages": [{"role": "user", "content": "x" * 9000}]}, 400, None),
    ],
)
def test_an_error_has_anthropics_shape(serve: Serve, body: dict[str, Any], status: int, kind: str | None) -> None:
    server = serve()
    for stream in (False, True):
        answer = server.http.post(PATH, json={**body, "stream": stream})
        error = answer.json()
        assert (answer.status_code, error["type"]) == (status, "error"), answer.text
        assert error["error"]["type"] == (kind or "invalid_request_error") and error["error"]["message"]
        assert error["request_id"].startswith("req_")
    assert server.http.get(PATH).json()["error"]["type"] == "invalid_request_error"


def test_a_failure_in_the_middle_is_an_error_event(serve: Serve) -> None:
    server = serve(ScriptedService(lambda *_: says("Hel", finish=FinishReason.ERROR, error="step 7 failed")))
    name, data = events(server, HELLO)[-1]
    assert (name, data["error"]) == ("error", {"type": "api_error", "message": "step 7 failed"})


def test_a_name_with_a_star_stands_for_many(serve: Serve) -> None:
    server = serve(aliases=("claude-*",))
    for name in ("claude-sonnet-4-5", "claude-3-5-haiku-20241022"):
        assert server.http.post(PATH, json={**HELLO, "model": name}).json()["model"] == name
    assert [entry["id"] for entry in server.http.get("/v1/models").json()["data"]] == ["scripted"]
    assert server.http.post(PATH, json={**HELLO, "model": "gpt-4"}).status_code == 404


def test_the_billing_line_of_the_system_text_does_not_reach_the_prompt(serve: Serve) -> None:
    server = serve()
    prompts = []
    for number in (1, 2):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={number};"},
            {"type": "text", "text": "You are helpful.", "cache_control": {"type": "ephemeral"}},
        ]
        server.http.post(PATH, json={**HELLO, "system": system})
        prompts.append(server.service.submitted[-1][0])
        openai = [{"role": "system", "content": f"x-anthropic-billing-header: cch={number}\n\nYou are helpful."}]
        server.http.post("/v1/chat/completions", json={"messages": openai + HELLO["messages"]})
        prompts.append(server.service.submitted[-1][0])
    assert len(set(prompts)) == 1
    assert b"system\nYou are helpful." in bytes(token_id for token_id in prompts[0] if token_id < 256)


def chat(**fields: Any) -> dict[str, Any]:
    ask = chat_request(msgspec.convert({**HELLO, **fields}, MessagesRequest))
    return msgspec.to_builtins(ask)


def test_results_of_tools_come_before_what_the_user_says_beside_them() -> None:
    turns = chat(
        messages=[
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I ask.", "signature": "x"},
                    {"type": "text", "text": "One moment."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "And tomorrow?"},
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Sunny"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True},
                ],
            },
        ]
    )["messages"]
    assert turns[1] == {
        "role": "assistant",
        "content": "One moment.",
        "reasoning_content": "I ask.",
        "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
        ],
    }
    assert turns[2:] == [
        {"role": "tool", "tool_call_id": "t1", "content": "Sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no such city"},
        {"role": "user", "content": "And tomorrow?"},
    ]


def test_tools_and_choices_become_openais() -> None:
    ask = chat(tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search"}], tool_choice={"type": "any"})
    function = {"name": "weather", "description": "Tells it.", "parameters": WEATHER["input_schema"]}
    assert ask["tools"] == [{"type": "function", "function": function}] and ask["tool_choice"] == "required"
    named = chat(tools=[WEATHER], tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert named["parallel_tool_calls"] is False


def test_a_last_message_of_the_assistant_is_gone_on_from(serve: Serve) -> None:
    server = serve()
    begun = [*HELLO["messages"], {"role": "assistant", "content": "Once upon"}]
    server.http.post(PATH, json={**HELLO, "messages": begun})
    prompt = bytes(token_id for token_id in server.service.submitted[0][0] if token_id < 256)
    assert prompt.endswith(b"assistant\nOnce upon")


def test_a_wrong_block_is_named_by_its_place() -> None:
    with pytest.raises(BadParameter) as refused:
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "audio"}]}])
    assert refused.value.param == "messages[0].content[1]"


def test_ids_without_text_make_no_block(serve: Serve) -> None:
    held = [Delta(token_ids=(226,)), Delta(token_ids=(150,)), *says()]
    told = events(serve(ScriptedService(lambda *_: held)), HELLO)
    assert [name for name, _ in told] == ["message_start", "message_delta", "message_stop"]
