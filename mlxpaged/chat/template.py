"""A model's chat template: messages in, text out, in a sandbox. Owns the Jinja environment and the fall-backs for
templates that refuse a system role or neighbouring turns of one role; never touches a tokenizer."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import BadParameter, RequestError
from .messages import Messages, Turn, fold_system, merge_neighbours, tools_as_text, turns_of

_log = logging.getLogger(__name__)

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}mlxpaged\N{OBJECT REPLACEMENT CHARACTER}"
"""A text no message holds: shows where a template put (or dropped) the message it was given in."""


class ChatTemplate:
    """One compiled template. `special_tokens` are its named texts (bos_token, eos_token, ...).

    Follows the conventions of Hugging Face templates: `raise_exception`, `strftime_now`, loop controls, a `tojson`
    that leaves HTML characters alone, `{% generation %}` blocks, trimmed blocks. Safe to use from any thread.
    Raises RequestError when the source is not a template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise RequestError(f"the model's chat template cannot be read: {error}; use plain completions") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._short_ids = _NINE_LETTERS.search(source) is not None
        self._knows_developer = "developer" in source
        self._noted: set[str] = set()
        self._keeps_system = self._probe_system()
        self.takes_tools = self._probe_tools()

    def render(self, conversation: Messages) -> str:
        """The prompt's text. Raises RequestError with the template's own words when it refuses the messages."""
        turns = turns_of(conversation)
        if not self._knows_developer:
            turns = [{**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in turns]
        if not self.takes_tools:
            turns = tools_as_text(turns, conversation.tools)
        if self._short_ids:
            turns = [_with_short_ids(turn) for turn in turns]
        if "message.thinking" in self.source:
            turns = [_with_thinking(turn) for turn in turns]
        extra = dict(conversation.template_kwargs)
        if conversation.tools and self.takes_tools:
            extra["tools"] = [dict(tool) for tool in conversation.tools]
        if conversation.continue_final_message:
            turns[-1] = {**turns[-1], "content": turns[-1]["content"] + _MARK}
        refusal: RequestError | None = None
        for note, shape in self._shapes(turns):
            try:
                text = self._run(shape, extra, conversation.add_generation_prompt)
            except RequestError as error:
                refusal = refusal or error
                continue
            if note:
                self._say_once(note)
            return _cut_at_mark(text) if conversation.continue_final_message else text
        assert refusal is not None
        raise refusal

    def _shapes(self, turns: list[Turn]) -> Iterator[tuple[str | None, list[Turn]]]:
        """The turns as they are, then what to try when the template refuses them, mildest first."""
        has_system = any(turn["role"] in {"system", "developer"} for turn in turns)
        merged = merge_neighbours(turns)
        if self._keeps_system or not has_system:
            yield None, turns
            if merged != turns:
                yield "consecutive turns of one role were merged", merged
        if has_system:
            yield "the system message was put into the first user turn", merge_neighbours(fold_system(turns))

    def _run(self, turns: list[Turn], extra: Mapping[str, Any], add_generation_prompt: bool) -> str:
        # `tools` and `documents` must be there: templates ask `tools is not none`, which an undefined name passes.
        variables = {"tools": None, "documents": None, **self._special_tokens, **extra}
        variables.update(messages=turns, add_generation_prompt=add_generation_prompt)
        try:
            return self._template.render(variables)
        except _Refusal as error:
            raise BadParameter(str(error), param="messages") from error
        except Exception as error:  # a template is a program of its own: whatever it raises is about this request
            reason = f"{type(error).__name__}: {error}"
            raise BadParameter(f"the model's chat template failed: {reason}", param="messages") from error

    def _probe_system(self) -> bool:
        """Whether a system message arrives in the prompt: some templates refuse it, some drop it without a word."""
        user = {"role": "user", "content": "hello"}
        try:
            self._run([user], {}, True)
        except RequestError:
            return True  # it fails without a system message too, so nothing was learnt
        try:
            return _MARK in self._run([{"role": "system", "content": _MARK}, user], {}, True)
        except RequestError:
            return False

    def _probe_tools(self) -> bool:
        """Whether a tool arrives in the prompt."""
        tool = {"name": _MARK, "description": "x", "parameters": {"type": "object", "properties": {}}}
        turns = [{"role": "system", "content": "x"}] if self._keeps_system else []
        try:
            text = self._run(
                [*turns, {"role": "user", "content": "x"}], {"tools": [{"type": "function", "function": tool}]}, True
            )
        except RequestError:
            return "tools" in self.source  # it wants other messages than these; its own words decide
        return _MARK in text or json.dumps(_MARK)[1:-1] in text

    def _say_once(self, note: str) -> None:
        if note not in self._noted:
            self._noted.add(note)
            _log.warning("the model's chat template refuses these messages as they are: %s", note)


_NINE_LETTERS = re.compile(r"length\s*!=\s*9\b")
"""Mistral's templates refuse ids of tool calls that are not nine letters or digits."""


def _with_short_ids(turn: Turn) -> Turn:
    """Ids of tool calls as nine letters, the same for the call and its result."""
    turn = dict(turn)
    if "tool_call_id" in turn:
        turn["tool_call_id"] = _short_id(turn["tool_call_id"])
    if "tool_calls" in turn:
        turn["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in turn["tool_calls"]]
    return turn


def _with_thinking(turn: Turn) -> Turn:
    """gpt-oss's template reads thinking under its own name, and refuses it beside content."""
    if turn["content"] or "reasoning_content" not in turn:
        return turn
    return {**turn, "thinking": turn["reasoning_content"]}


def _short_id(call_id: Any) -> str:
    text = str(call_id)
    if re.fullmatch("[A-Za-z0-9]{9}", text):
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:9]


class _Refusal(TemplateError):
    """`raise_exception` was called: the message is the template author's."""


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the reply for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _cut_at_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_MARK)
    if not mark:
        raise BadParameter(
            "the model's chat template drops the final message, so it cannot be continued",
            param="continue_final_message",
        )
    return before


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
