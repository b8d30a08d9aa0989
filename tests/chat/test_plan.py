"""Chat requests planned and answered by the real engine over a tiny random model: whatever it would say, a forced call
and a format hold, in every family's markup."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken

from mlxpaged.chat.backend import LocalBackend
from mlxpaged.chat.deltas import ChatFinish
from mlxpaged.chat.messages import Messages
from mlxpaged.chat.plan import ChatPlan, ReplyRules
from mlxpaged.chat.reader import ReplyReader
from mlxpaged.chat.tools import MARKS, Family, ToolUse, tools_of
from mlxpaged.chat.tools_harmony import MARKS as HARMONY_MARKS
from mlxpaged.config import EngineConfig
from mlxpaged.engine import host as host_module
from mlxpaged.engine.service import EngineService
from mlxpaged.sched.requests import FinishReason, SamplingParams
from tests.chat.replies import Read, put_together
from tests.model.families import tiny_model
from tests.model.rig import loaded
from tests.model.words import byte_tokenizer

SHORT = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "days": {"type": "integer", "minimum": 0, "maximum": 99},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "days", "unit"],
            "additionalProperties": False,
        },
    },
}
TOOLS = tools_of([SHORT, {"type": "function", "function": {"name": "now"}}])

TEMPLATES: dict[Family, str] = {
    "hermes": "<tool_call> <think> </think>",
    "qwen-coder": "<tool_call> <function=",
    "glm": "<arg_key>",
    "gemma": "<|tool_call>",
    "function-gemma": "<start_function_call>",
    "llama": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral-header": "[TOOL_CALLS][ARGS]",
    "gpt-oss": "<|channel|>",
}
"""What tells each family; the rest of these templates is the same."""

ASK = Messages(({"role": "user", "content": "hi"},), tools=tuple(tool.spec for tool in TOOLS))


def marked_tokenizer(family: Family, special: bool) -> Any:
    """Bytes, and the family's marks as tokens where `special`."""
    body = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson if tools }}"
    tokenizer = byte_tokenizer(chat_template=body + "{# " + TEMPLATES[family] + " #}")
    if special:
        marks = [*MARKS[family], *(HARMONY_MARKS if family == "gpt-oss" else ())]
        tokenizer.raw.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    if family == "hermes":  # Qwen's are tokens, but not special ones
        tokenizer.raw.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    return tokenizer


@pytest.fixture
def backend_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Any]:
    """backend_of(family, special=..., **EngineConfig) over a tiny model that draws from 280 ids."""
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(host_module, "resolve", lambda name, *_, **__: name)
    monkeypatch.setattr(host_module, "require_room", lambda source, config: None)
    services: list[EngineService] = []

    def make(family: Family, special: bool = False, **engine: Any) -> LocalBackend:
        def tiny(source: Any, dtype: Any) -> Any:
            model, config = tiny_model("llama", vocab_size=280)
            return loaded(model, config, tokenizer=marked_tokenizer(family, special), context_len=4000)

        monkeypatch.setattr(host_module, "load", tiny)
        service = EngineService(EngineConfig(num_blocks=600, max_rows=8, **engine))
        services.append(service)
        service.load("tiny").result(60)
        return LocalBackend(service)

    yield make
    for service in services:
        service.close()


async def answer(backend: LocalBackend, plan: ChatPlan) -> Read:
    assert plan.new_grammar is not None
    reader, parts, finish = ReplyReader(plan.syntax), [], None
    async for delta in await backend.start(plan.prompt_ids, plan.sampling, plan.new_grammar()):
        assert delta.finish is not FinishReason.ERROR, delta.error
        read = reader.read(delta)
        parts += read.parts
        finish = read.finish
    return put_together(parts, finish)


def ask(backend: LocalBackend, rules: ReplyRules, count: int = 2, **sampling: Any) -> list[Read]:
    """Replies at temperature 1.5, at once."""

    async def work() -> list[Read]:
        params = [SamplingParams(temperature=1.5, seed=seed, max_tokens=2500, **sampling) for seed in range(count)]
        plans = [await backend.plan(ASK, rules, each) for each in params]
        return await asyncio.gather(*(answer(backend, plan) for plan in plans))

    return asyncio.run(work())


def check_call(name: str, text: str) -> None:
    arguments = json.loads(text)
    if name == "now":
        assert arguments == {}
    else:
        assert set(arguments) == {"city", "days", "unit"} and arguments["unit"] in {"C", "F"}
        assert len(arguments["city"]) <= 6 and 0 <= arguments["days"] <= 99


@pytest.mark.parametrize("special", [False, True], ids=["text marks", "token marks"])
@pytest.mark.parametrize("family", [family for family in TEMPLATES if family not in {"hermes", "gpt-oss"}])
def test_forced_calls_are_valid_whatever_the_model_would_say(backend_of: Any, family: Family, special: bool) -> None:
    backend = backend_of(family, special, ahead=int(special))
    for use in (ToolUse(TOOLS, named="weather"), ToolUse(TOOLS, required=True, parallel=False)):
        for reply in ask(backend, ReplyRules(use)):
            assert len(reply.calls) == 1 and reply.content == ""
            check_call(*reply.calls[0])
            assert use.named is None or reply.calls[0][0] == use.named
            assert reply.finish is (ChatFinish.TOOL_CALLS if use.named is None else ChatFinish.STOP)
    for reply in ask(backend, ReplyRules(ToolUse(TOOLS, required=True))):
        assert 1 <= len(reply.calls) <= 8 and reply.content == ""
        for call in reply.calls:
            check_call(*call)


def test_a_thinking_model_thinks_first_and_calls_then(backend_of: Any) -> None:
    backend = backend_of("hermes")
    for reply in ask(backend, ReplyRules(ToolUse(TOOLS, required=True)), logit_bias=((259, 9.0),)):
        assert reply.content == "" and "</think>" not in reply.reasoning
        for call in reply.calls:
            check_call(*call)
        assert reply.calls


def test_gpt_oss_ends_its_analysis_and_calls(backend_of: Any) -> None:
    backend = backend_of("gpt-oss", special=True)
    end = marked_tokenizer("gpt-oss", True).token_id("<|end|>")
    for reply in ask(backend, ReplyRules(ToolUse(TOOLS, named="weather")), logit_bias=((end, 9.0),)):
        assert (reply.content, len(reply.calls)) == ("", 1)
        check_call(*reply.calls[0])


SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 4}, "ok": {"type": "boolean"}},
    "required": ["word", "ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("family", ["glm", "hermes", "gpt-oss"])
def test_an_answer_follows_its_schema_in_every_kind_of_reply(backend_of: Any, family: Family) -> None:
    backend = backend_of(family, special=True)
    ends = [marked_tokenizer(family, True).token_id(mark) for mark in ("</think>", "<|end|>")]
    bias = tuple((end, 9.0) for end in ends if end is not None)
    for reply in ask(backend, ReplyRules(schema=SCHEMA, strict=True), logit_bias=bias):
        said = json.loads(reply.content)
        assert set(said) == {"word", "ok"} and len(said["word"]) <= 4 and isinstance(said["ok"], bool)
        assert reply.finish is ChatFinish.STOP


def test_with_tools_that_may_be_called_a_reply_is_a_call_or_an_answer_of_the_schema(backend_of: Any) -> None:
    backend = backend_of("glm")
    rules = ReplyRules(ToolUse(TOOLS, parallel=False), schema=SCHEMA)
    replies = ask(backend, rules, count=8)
    assert all(bool(reply.calls) != bool(reply.content) for reply in replies)
    for reply in replies:
        for call in reply.calls:
            check_call(*call)
        assert not reply.content or set(json.loads(reply.content)) == {"word", "ok"}
    assert {bool(reply.calls) for reply in replies} == {True, False}


def test_what_is_cut_by_max_tokens_says_length(backend_of: Any) -> None:
    async def work(backend: LocalBackend) -> Read:
        sampling = SamplingParams(temperature=1.5, seed=1, max_tokens=5)
        return await answer(backend, await backend.plan(ASK, ReplyRules(schema=SCHEMA), sampling))

    reply = asyncio.run(work(backend_of("glm")))
    assert reply.finish is ChatFinish.LENGTH and reply.content.startswith("{")


def test_a_plan_shows_marks_and_arms_stop_strings_behind_thinking(backend_of: Any) -> None:
    async def work(backend: LocalBackend, use: ToolUse) -> ChatPlan:
        return await backend.plan(ASK, ReplyRules(use), SamplingParams(stop=("x",)))

    gemma = marked_tokenizer("gemma", True)
    plan = asyncio.run(work(backend_of("gemma", special=True), ToolUse(TOOLS)))
    assert plan.sampling.shown_special_ids == tuple(gemma.token_id(mark) for mark in MARKS["gemma"])
    assert plan.new_grammar is None and plan.sampling.stop == ("x",)
    qwen = marked_tokenizer("hermes", False)
    plan = asyncio.run(work(backend_of("hermes"), ToolUse(TOOLS, parallel=False)))
    assert plan.sampling.stop_until == (qwen.token_id("<think>"),)
    assert plan.sampling.stop_after == (qwen.token_id("</think>"),)
    assert plan.sampling.stop == ("x", "</tool_call>")
