"""Whatever a body holds: no 5xx, every 4xx has the error's shape, and the server goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxpaged.server import fields
from tests.scripted import ScriptedService
from tests.server.conftest import Running, running_server

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
numbers = st.none() | st.integers(-3, 30) | st.integers() | st.floats(-3, 3) | st.floats(allow_nan=False)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "king"])
parts = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": json_values}) | json_values
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": roles | json_values, "content": st.text(max_size=20) | st.none() | parts | json_values},
        optional={"tool_calls": json_values, "name": json_values, "tool_call_id": json_values},
    )
    | json_values,
    max_size=4,
)
prompts = st.text() | st.lists(st.integers(-1, 300)) | st.lists(st.lists(st.integers(0, 258)) | st.text()) | json_values


names = st.sampled_from(["f", "g", "", "a b"])
schemas = st.recursive(
    st.sampled_from(
        [{"type": "string"}, {"type": "integer"}, {"type": "objekt"}, {"$ref": "#"}, {"$ref": "#/$defs/a"}, {}, True]
    )
    | st.fixed_dictionaries({}, optional={"type": json_values, "pattern": st.text(max_size=5), "enum": json_values}),
    lambda inner: st.fixed_dictionaries(
        {"type": st.sampled_from(["object", "array", "string"])},
        optional={
            "properties": st.dictionaries(st.text(max_size=3), inner, max_size=3),
            "required": json_values,
            "items": inner,
            "anyOf": st.lists(inner, max_size=2),
            "$defs": st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
            "x-guidance": json_values,
        },
    ),
    max_leaves=5,
)
functions = st.fixed_dictionaries({"name": names | json_values}, optional={"parameters": schemas | json_values})
tools = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": functions | json_values}) | json_values
)
choices = st.sampled_from([None, "none", "auto", "required", "any"]) | st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "allowed_tools"])},
    optional={"function": functions, "allowed_tools": st.fixed_dictionaries({"tools": tools | json_values})},
)
formats = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema", "xml"])},
    optional={
        "schema": schemas | json_values,
        "json_schema": st.fixed_dictionaries({}, optional={"schema": schemas | json_values, "strict": json_values}),
    },
)
DEMANDS = st.fixed_dictionaries(
    {"messages": st.just([{"role": "user", "content": "hi"}])},
    optional={
        "tools": tools | json_values,
        "tool_choice": choices | json_values,
        "parallel_tool_calls": st.none() | st.booleans(),
        "response_format": formats | json_values,
        "stream": st.booleans(),
    },
)


def bodies(kind: type, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with the required field, and any of the kind's fields with likely or unlikely values."""
    names = [field.name for field in msgspec.structs.fields(kind) if field.name not in known]
    optional = {name: numbers | st.booleans() | json_values for name in names}
    return st.fixed_dictionaries(known, optional={**optional, "unknown": json_values})


kinds = st.sampled_from(["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking", "document"])
blocks = st.lists(
    st.fixed_dictionaries(
        {"type": kinds},
        optional={
            "text": st.text(max_size=8) | json_values,
            "content": st.text(max_size=8) | json_values,
            "id": st.text(max_size=3) | json_values,
            "name": names | json_values,
            "input": json_values,
            "tool_use_id": st.text(max_size=3) | json_values,
            "thinking": json_values,
            "source": json_values,
        },
    )
    | json_values,
    max_size=3,
)
anthropic_messages = st.lists(
    st.fixed_dictionaries({"role": roles | json_values, "content": st.text(max_size=20) | blocks | json_values})
    | json_values,
    max_size=4,
)
anthropic_bodies = st.fixed_dictionaries(
    {"messages": anthropic_messages},
    optional={
        "system": st.text(max_size=8) | blocks | json_values,
        "max_tokens": numbers,
        "stop_sequences": st.lists(st.text(max_size=3)) | json_values,
        "stream": st.booleans(),
        "tools": st.lists(st.fixed_dictionaries({"name": names, "input_schema": schemas | json_values}) | json_values),
        "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none", "x"])}),
        "thinking": json_values,
        "temperature": numbers,
    },
)

REQUESTS = st.one_of(
    st.tuples(st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"]), anthropic_bodies),
    st.tuples(st.sampled_from(["/models/load", "/models/unload"]), bodies(fields.ModelRequest)),
    st.tuples(st.just("/v1/chat/completions"), bodies(fields.ChatRequest, messages=messages)),
    st.tuples(st.just("/v1/completions"), bodies(fields.CompletionRequest, prompt=prompts)),
    st.tuples(st.just("/tokenize"), bodies(fields.TokenizeRequest)),
    st.tuples(st.just("/detokenize"), bodies(fields.DetokenizeRequest, tokens=st.lists(st.integers()) | json_values)),
)
PATHS = st.sampled_from(
    ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/messages", "/models/load"]
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(ScriptedService()) as running:
        yield running


def check(server: Running, path: str, body: bytes) -> int:
    answer = server.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, (body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert {"message", "type"} | (set() if "messages" in path else {"param", "code"}) <= set(error)
        assert isinstance(error["message"], str) and error["message"] and "\n" not in error["message"]
    return answer.status_code


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(request=REQUESTS)
def test_any_fields(server: Running, request: tuple[str, dict[str, Any]]) -> None:
    path, body = request
    check(server, path, msgspec.json.encode(body))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=DEMANDS)
def test_any_tools_and_formats(server: Running, body: dict[str, Any]) -> None:
    check(server, "/v1/chat/completions", msgspec.json.encode(body))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=PATHS, body=st.binary(max_size=64) | json_values.map(msgspec.json.encode))
def test_any_bytes(server: Running, path: str, body: bytes) -> None:
    assert check(server, path, body) in {400, 404}


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "seed": ' + b"9" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"' + b"9" * 5000 + b'": 1}}',
        b'{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"messages": 1, "bos_token": []}'
        b', "continue_final_message": true}',
        b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "'
        + b"[" * 5000
        + b'"}}]}, {"role": "king"}]}',
    ],
    ids=["nested", "half a pair", "not utf-8", "long number", "nan", "long key", "reserved names", "deep arguments"],
)
def test_bodies_that_have_broken_others(server: Running, body: bytes) -> None:
    assert check(server, "/v1/chat/completions", body) == 400


def test_after_all_that_the_server_still_answers(server: Running) -> None:
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}]})
    assert check(server, "/v1/chat/completions", body) == 200
    server.service.wait_until(lambda stats: stats.num_running == stats.num_waiting == 0)
