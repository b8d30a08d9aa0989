"""Ten things that break clients when they are missed, one test each."""

from __future__ import annotations

import msgspec
import pytest

from mlxpaged.engine.events import EngineStats
from tests.scripted import ScriptedService, says
from tests.server.conftest import Running, Serve

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
STREAM = {**HELLO, "stream": True}
USAGE_TOO = {**STREAM, "stream_options": {"include_usage": True}}


def chunks(server: Running, body: dict[str, object]) -> list[dict]:
    lines = server.http.post("/v1/chat/completions", json=body).content.decode().split("\n\n")
    return [msgspec.json.decode(line[6:]) for line in lines if line.startswith("data: {")]


def is_idle(stats: EngineStats) -> bool:
    return stats.num_running == stats.num_waiting == 0


def test_1_every_chunk_has_the_same_id_time_model_and_kind(serve: Serve) -> None:
    heads = {(c["id"], c["created"], c["model"], c["object"]) for c in chunks(serve(), USAGE_TOO)}
    assert len(heads) == 1
    assert heads.pop()[2:] == ("scripted", "chat.completion.chunk")


def test_2_the_first_delta_of_each_index_is_the_role_with_an_empty_content(serve: Serve) -> None:
    for index in range(3):
        own = [c["choices"][0] for c in chunks(serve(), {**STREAM, "n": 3}) if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in c["delta"] for c in own[1:])


def test_3_each_index_finishes_once_before_usage_and_done(serve: Serve) -> None:
    told = chunks(serve(), {**USAGE_TOO, "n": 3})
    finishes = [c["choices"][0]["index"] for c in told[:-1] if c["choices"][0]["finish_reason"]]
    assert sorted(finishes) == [0, 1, 2]
    assert told[-1]["choices"] == []


def test_4_usage_is_sent_only_when_asked_for_and_with_empty_choices(serve: Serve) -> None:
    server = serve()
    assert not any("usage" in chunk for chunk in chunks(server, STREAM))
    assert [chunk["choices"] for chunk in chunks(server, USAGE_TOO) if "usage" in chunk] == [[]]


def test_5_both_openai_streams_end_with_done(serve: Serve) -> None:
    server = serve()
    for path, body in [("chat/completions", STREAM), ("completions", {"prompt": "a", "stream": True})]:
        assert server.http.post(f"/v1/{path}", json=body).content.endswith(b"}\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"messages": []}, "messages"),
        ({**HELLO, "temperature": 9}, "temperature"),
        ({"messages": [{"role": "king", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "maximum context length is 4096 tokens"),
        ({**HELLO, "logit_bias": {"259": 1}}, "outside the vocabulary"),
    ],
)
def test_6_what_is_wrong_is_a_400_even_for_a_stream(serve: Serve, body: dict[str, object], word: str) -> None:
    server = serve()
    answer = server.http.post("/v1/chat/completions", json={**body, "stream": True})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert word in answer.json()["error"]["message"]
    assert server.service.submitted == []


def test_6_a_full_queue_is_a_503_with_retry_after_and_leaves_nothing_behind(serve: Serve) -> None:
    service = ScriptedService(manual=True, max_rows=1, max_queue=1)
    server = serve(service)
    with server.http.stream("POST", "/v1/chat/completions", json=STREAM):
        service.wait_until(lambda stats: len(stats.rows) == 1)
        answer = server.http.post("/v1/chat/completions", json={**STREAM, "n": 2})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "overloaded"
        assert answer.json()["error"]["message"].startswith("1 of 2 requests are live already; try again")
        assert len(service.submitted) == 1
    service.wait_until(lambda stats: service.num_cancelled == 1)
    service.step()
    service.wait_until(is_idle)


def test_6_more_replies_than_ever_fit_are_a_400_that_names_how_many_do(serve: Serve) -> None:
    server = serve(ScriptedService(manual=True, max_rows=1, max_queue=1))
    for path, body in (("chat/completions", STREAM), ("completions", {"prompt": ["a", "b"]})):
        answer = server.http.post(f"/v1/{path}", json={**body, "n": 3})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "n" and "this server takes 2 (" in error["message"]


def test_6_a_model_that_is_still_loading_is_a_503(serve: Serve) -> None:
    server = serve(ScriptedService(loading=True))
    answer = server.http.post("/v1/chat/completions", json=STREAM)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "still loading" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "loading"
    health = server.http.get("/health")
    assert (health.status_code, health.json()["error"]["message"]) == (503, "Loading model")
    assert server.http.get("/v1/models").json()["data"][0]["state"] == "loading"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nothing", None, 404),
        ("GET", "/v1/models/org/unknown", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("DELETE", "/v1/models", None, 405),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/completions", b"", 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "n": "two"}', 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "model": "other"}', 404),
    ],
)
def test_7_every_error_has_the_four_keys(serve: Serve, method: str, path: str, body: bytes | None, status: int) -> None:
    answer = serve().http.request(method, path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]


def test_7_an_error_names_the_field(serve: Serve) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    error = serve().http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "messages[0].content[0]"
    assert "reads text only" in error["message"]


def test_8_tool_call_deltas_carry_their_index_always_and_id_type_and_name_once(serve: Serve) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    server = serve(ScriptedService(lambda *_: says(*(call + call))))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(server, {**STREAM, "tools": [tool]})]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert sorted({call["index"] for call in calls}) == [0, 1] and all("content" not in d for d in deltas[1:])
    heads = [call for call in calls if "id" in call]
    assert [(head["index"], head["type"], head["function"]) for head in heads] == [
        (index, "function", {"name": "f", "arguments": ""}) for index in (0, 1)
    ]
    assert len({head["id"] for head in heads}) == 2
    texts = ["".join(c["function"]["arguments"] for c in calls if c["index"] == index) for index in (0, 1)]
    assert texts == ['{"a": 1}'] * 2
    for absent in ({"tools": []}, {"tools": None, "tool_choice": None}, {"tools": [tool], "tool_choice": "none"}):
        message = server.http.post("/v1/chat/completions", json={**HELLO, **absent}).json()["choices"][0]["message"]
        assert message["content"] == call + call and "tool_calls" not in message


def test_9_a_closed_connection_cancels_the_request(serve: Serve) -> None:
    service = ScriptedService(lambda *_: says(*"abc"), manual=True)
    with serve(service).http.stream("POST", "/v1/chat/completions", json=STREAM):
        service.wait_until(lambda stats: stats.num_running == 1)
    service.wait_until(lambda _: service.num_cancelled == 1)
    service.step()
    service.wait_until(is_idle)


def test_10_there_are_no_id_lines_and_no_empty_data(serve: Serve) -> None:
    lines = serve().http.post("/v1/chat/completions", json=USAGE_TOO).content.split(b"\n")
    assert not any(line.startswith(b"id:") for line in lines)
    assert all(line == b"" or line.startswith(b"data: ") for line in lines)
    assert b"data: " not in lines
