"""What the fields of a body mean for sampling, and which values are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mlxpaged.errors import RequestError
from mlxpaged.sched.requests import SamplingParams
from mlxpaged.server import fields
from tests.scripted import ScriptedService
from tests.server.conftest import Serve

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def chat(defaults: dict[str, float] | None = None, **body: Any) -> SamplingParams:
    ask = fields.parse(fields.ChatRequest, msgspec.json.encode({**HELLO, **body}))
    return fields.chat_sampling(ask, defaults or {})


def completion(**body: Any) -> SamplingParams:
    ask = fields.parse(fields.CompletionRequest, msgspec.json.encode({"prompt": "a", **body}))
    return fields.completion_sampling(ask, {})


def test_an_empty_chat_body_samples_at_temperature_1_until_the_context_is_full() -> None:
    assert chat() == SamplingParams(temperature=1.0)


def test_a_completion_has_16_tokens_unless_told_otherwise() -> None:
    assert completion().max_tokens == 16
    assert completion(max_tokens=None).max_tokens == 16
    assert completion(max_tokens=3).max_tokens == 3


def test_the_models_own_defaults_fill_what_is_left_out_or_null() -> None:
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20.0, "min_p": 0.01, "repetition_penalty": 1.1}
    expected = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.1)
    assert chat(own) == expected
    assert chat(own, temperature=None, top_p=None, top_k=None) == expected
    assert chat(own, temperature=0, top_k=-1).temperature == 0
    assert chat(own, top_k=-1).top_k == 0


def test_null_is_the_same_as_absent_for_every_field() -> None:
    for kind, sampling_of, required in (
        (fields.ChatRequest, chat, {"messages"}),
        (fields.CompletionRequest, completion, {"prompt"}),
    ):
        names = {field.name for field in msgspec.structs.fields(kind)} - required
        assert len(names) > 25
        assert sampling_of(**dict.fromkeys(names)) == sampling_of()


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"max_tokens": 9, "max_completion_tokens": 5}, "max_tokens", 5),
        ({"max_tokens": 10**30}, "max_tokens", 2**31 - 1),
        ({"temperature": 1}, "temperature", 1.0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 10**15}, "top_k", 2**31 - 1),
        ({"repeat_penalty": 1.2}, "repetition_penalty", 1.2),
        ({"repeat_penalty": 1.2, "repetition_penalty": 1.3}, "repetition_penalty", 1.3),
        ({"stop": "END"}, "stop", ("END",)),
        ({"stop": ["", "a", "b", "c", "d", "e"]}, "stop", ("a", "b", "c", "d", "e")),
        ({"stop": ""}, "stop", ()),
        ({"seed": -(2**63)}, "seed", -(2**63)),
        ({"logit_bias": {"7": -100, "8": 1.5}}, "logit_bias", ((7, -100.0), (8, 1.5))),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 20}, "logprobs", 20),
        ({"logprobs": False}, "logprobs", None),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"min_tokens": 4}, "min_tokens", 4),
        ({"stop_token_ids": [5, 6]}, "stop_token_ids", (5, 6)),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
        ({"user": "me", "store": True, "keep_alive": 5, "num_ctx": "x"}, "temperature", 1.0),
    ],
)
def test_a_field_becomes_its_parameter(body: dict[str, Any], field: str, value: object) -> None:
    assert getattr(chat(**body), field) == value


def test_a_nucleus_of_nothing_is_the_best_token() -> None:
    assert (chat(top_p=0).top_p, chat(top_p=0).top_k) == (1.0, 1)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": 1}, "stop"),
        ({"stop": [str(i) for i in range(17)]}, "stop"),
        ({"logit_bias": {"dog": 1}}, "logit_bias"),
        ({"logit_bias": {"7": 101}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"messages": "hi"}, "messages"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**body)
    assert refused.value.param == param
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"stop": ["a"] * 100},
            'stop is ["a", "a", "a", "a", "a", "a", "a", "a", "a", "a", "a", "...; it must be at most 16 strings',
        ),
        ({"logit_bias": {"5": 1000}}, "logit_bias of token 5 is 1000.0; it must be from -100 to 100"),
        ({"logit_bias": {"dog": 1}}, 'logit_bias has the key "dog"; keys are token ids'),
        ({"seed": 2**63}, "seed is 9223372036854775808; it must be from -2^63 to 2^63-1"),
    ],
)
def test_a_refused_value_is_told_as_it_was_sent_and_in_short(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**body)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("role", "told"), [(None, "null"), ({"a": [1, True]}, '{"a": [1, true]}'), ("k" * 99, f'"{"k" * 56}...')]
)
def test_a_role_is_told_as_it_was_sent(serve: Serve, role: object, told: str) -> None:
    answer = serve().http.post("/v1/chat/completions", json={"messages": [{"role": role, "content": "a"}]})
    assert answer.json()["error"]["message"].startswith(f"messages[0].role is {told}; it must be one of ")


def test_a_completion_too_long_is_a_fault_of_its_prompt(serve: Serve) -> None:
    server = serve(ScriptedService(context_len=21))
    for body in ({"prompt": [1] * 30}, {"prompt": "a" * 30, "stream": True}):
        error = server.http.post("/v1/completions", json=body).json()["error"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert server.http.post("/v1/chat/completions", json=HELLO).json()["error"]["param"] == "messages"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_vllm_s_fields_reach_the_engine_from_both_endpoints(serve: Serve, path: str) -> None:
    server, given = (
        serve(),
        {
            "top_k": 7,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "min_tokens": 3,
            "ignore_eos": True,
            "stop_token_ids": [5, 6],
            "skip_special_tokens": False,
        },
    )
    answer = server.http.post(path, json={**(HELLO if "chat" in path else {"prompt": "a"}), "max_tokens": 9, **given})
    assert answer.status_code == 200
    (_, sampling), *_ = server.service.submitted
    assert {name: getattr(sampling, name) for name in given} == {**given, "stop_token_ids": (5, 6)}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_a_completions_own_fields_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        completion(**body)
    assert refused.value.param == param


def test_prompts_are_a_text_ids_or_a_list_of_either() -> None:
    assert fields.prompts_of("a") == ["a"]
    assert fields.prompts_of([1, 2]) == [[1, 2]]
    assert fields.prompts_of(["a", [1], "b"]) == ["a", [1], "b"]


@pytest.mark.parametrize("prompt", [None, 1, {}, [], [[]], [1, "a"], [True], ["a", [1, None]], [[[1]]], [1.5]])
def test_any_other_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(RequestError, match="prompt"):
        fields.prompts_of(prompt)


def test_max_tokens_is_cut_to_what_the_context_still_holds(serve: Serve) -> None:
    server = serve(ScriptedService(context_len=30))
    server.http.post("/v1/chat/completions", json={**HELLO, "max_tokens": 500, "min_tokens": 400, "top_k": 9999})
    (prompt_ids, sampling), *_ = server.service.submitted
    assert (len(prompt_ids), sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (21, 9, 9, 259)


def test_a_prompt_over_the_context_is_refused_with_both_numbers(serve: Serve) -> None:
    server = serve(ScriptedService(context_len=21))
    error = server.http.post("/v1/chat/completions", json=HELLO).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 21 tokens" in error["message"]
    assert "your request has 21" in error["message"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (21, 21)


def test_an_empty_text_is_the_bos_id_alone(serve: Serve) -> None:
    server = serve()
    assert server.http.post("/v1/completions", json={"prompt": ""}).status_code == 200
    assert server.service.submitted[0][0] == (256,)


def test_a_text_that_begins_with_the_bos_gets_no_second_one(serve: Serve) -> None:
    server = serve()
    assert server.http.post("/v1/completions", json={"prompt": "<s>a"}).status_code == 200
    assert server.service.submitted[0][0] == (256, 97)


def test_each_choice_has_its_number_and_the_same_seed(serve: Serve) -> None:
    server = serve()
    server.http.post("/v1/completions", json={"prompt": [[1], [2]], "n": 2, "seed": 5})
    started = [(prompt_ids, sampling.choice, sampling.seed) for prompt_ids, sampling in server.service.submitted]
    assert started == [((1,), 0, 5), ((1,), 1, 5), ((2,), 0, 5), ((2,), 1, 5)]


def test_too_many_prompts_are_refused(serve: Serve) -> None:
    server = serve()
    answer = server.http.post("/v1/completions", json={"prompt": ["a"] * 129, "n": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_a_token_id_outside_the_vocabulary_is_refused(serve: Serve) -> None:
    server = serve()
    for prompt in ([259], [-1], [[1], [10**25]]):
        error = server.http.post("/v1/completions", json={"prompt": prompt}).json()["error"]
        assert error["param"] == "prompt" and "outside the vocabulary" in error["message"]
    assert server.service.submitted == []
