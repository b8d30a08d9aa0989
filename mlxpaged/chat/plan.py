"""What one chat request needs before it starts: prompt, sampling, grammar, and how to read the reply. Owns which markup
of thinking and tools a model has; computes no token and reads no reply."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import BadParameter, shown
from ..model.tokenizer import Tokenizer
from ..sched.requests import MAX_STOP_STRINGS, Grammar, SamplingParams
from .grammar import Vocabulary, schema_notation
from .messages import Messages
from .reader import PLAIN, ReplySyntax
from .reasoning import ThinkTags, closed_by, opened_by, think_tags
from .template import ChatTemplate
from .tools import MARKS, MAX_CALLS, NO_TOOLS, TAGS, Family, Tool, ToolUse, family_of
from .tools_harmony import FINAL
from .tools_harmony import MARKS as HARMONY_MARKS


@dataclass(frozen=True, slots=True)
class ReplyRules:
    """What a request demands of its reply. `schema`: the answer is JSON of it, `strict` without keywords the grammar
    would ignore. `split_thinking` False leaves thinking in the answer, tags and all."""

    use: ToolUse = NO_TOOLS
    schema: Mapping[str, Any] | None = None
    strict: bool = False
    split_thinking: bool = True


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat request, checked: `prompt_ids` and `sampling` to start each reply with, a grammar of its own for each
    where `new_grammar` is not None, and the syntax to read them by."""

    prompt_ids: list[int]
    sampling: SamplingParams
    syntax: ReplySyntax = PLAIN
    new_grammar: Callable[[], Grammar] | None = None


class ChatFormat:
    """How one model writes chat replies. Safe to use from any thread."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.family: Family = family_of(template.source, self._is_token) if template.takes_tools else "hermes"
        self.harmony = family_of(template.source, self._is_token) == "gpt-oss"
        self.think = None if self.harmony else think_tags(template.source, self._is_token)
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()

    def plan(
        self, prompt: str, prompt_ids: list[int], conversation: Messages, rules: ReplyRules, sampling: SamplingParams
    ) -> ChatPlan:
        """The plan of one request whose conversation was rendered as `prompt`. Raises BadParameter."""
        think = self.think
        opened = think is not None and opened_by(prompt, conversation, think)
        may_think = think is not None and not closed_by(prompt, conversation, think)
        syntax = ReplySyntax(
            family=self.family if rules.use.tools else None,
            use=rules.use,
            think=think if rules.split_thinking and may_think else None,
            opened=opened,
            harmony=self.harmony and rules.split_thinking,
            own_stop=self._own_stop(rules.use, sampling),
        )
        notation = self._notation(rules, think if may_think else None, opened)
        compiled = None
        if notation is not None:
            param = "response_format" if rules.schema is not None else "tools"
            compiled = self._vocabulary_of().compile(notation, param)
        sampling = self._sampling(sampling, syntax, think if may_think else None)
        return ChatPlan(prompt_ids, sampling, syntax, compiled.fresh if compiled else None)

    def _is_token(self, text: str) -> bool:
        return self._tokenizer.token_id(text) is not None

    def _ids(self, text: str) -> tuple[int, ...]:
        found = self._tokenizer.token_id(text)
        return (found,) if found is not None else tuple(self._tokenizer.encode(text))

    def _sampling(self, sampling: SamplingParams, syntax: ReplySyntax, think: ThinkTags | None) -> SamplingParams:
        """Stop strings count in the answer only, markup is shown to the reader, and a reply that may hold one call
        ends behind it."""
        marks: list[str] = []
        if syntax.family:
            marks += MARKS[syntax.family]
        if think:
            marks += (think.start, think.end)
        if syntax.harmony:
            marks += HARMONY_MARKS
        shown = tuple(id_ for mark in marks if (id_ := self._tokenizer.token_id(mark)) is not None)
        after, until = sampling.stop_after, sampling.stop_until
        if syntax.harmony:
            after = tuple(self._tokenizer.encode(FINAL))
        elif syntax.think:
            after, until = self._ids(syntax.think.end), () if syntax.opened else self._ids(syntax.think.start)
        stop = (*sampling.stop, syntax.own_stop) if syntax.own_stop else sampling.stop
        return replace(sampling, stop=stop, stop_after=after, stop_until=until, shown_special_ids=shown)

    def _own_stop(self, use: ToolUse, sampling: SamplingParams) -> str | None:
        """The end tag of the one call that is wanted, as a stop string."""
        if use.most_calls != 1 or self.family not in TAGS or len(sampling.stop) >= MAX_STOP_STRINGS:
            return None
        tag = TAGS[self.family][1]
        return None if tag in sampling.stop else tag

    def _vocabulary_of(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                marks = [*MARKS[self.family], *(HARMONY_MARKS if self.harmony else ())]
                marks += [self.think.start, self.think.end] if self.think else []
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, marks)
            return self._vocabulary

    def _notation(self, rules: ReplyRules, think: ThinkTags | None, opened: bool) -> str | None:
        """The grammar of the whole reply; None where the model is free."""
        forced = rules.use.forced
        if not forced and rules.schema is None:
            return None
        answers: list[str] = []
        lines: list[str] = []
        callable_tools = forced or rules.use.tools
        if callable_tools:
            answers.append("calls")
            lines += self._calls(callable_tools, 1 if rules.use.most_calls == 1 else MAX_CALLS)
        if rules.schema is not None and not forced:
            answers.append("answer")
            head = self._vocabulary_of().literal(FINAL) if self.harmony else ""
            lines += [f"answer: {head} json"]
            lines += [f"json: {schema_notation(rules.schema, 'response_format', lenient=not rules.strict)}"]
        return "\n".join([*self._thinking(think, opened), f"reply: {' | '.join(answers)}", *lines])

    def _thinking(self, think: ThinkTags | None, opened: bool) -> list[str]:
        """What may or must come before the reply."""
        literal, text = self._vocabulary_of().literal, r"text: /(.|\n)*/"
        if self.harmony:
            start, end = literal("<|channel|>analysis<|message|>"), literal("<|end|><|start|>assistant")
            return ["start: analysis? reply", f"analysis: {start} text {end}", text]
        if think is None:
            return ["start: reply"]
        if self._vocabulary_of().is_mark(think.end):
            rest = [f"rest: text {literal(think.end)} gap", text]
        else:
            rest = ["rest: thought gap", f"thought[suffix={_json(think.end)}]: /(.|\\n)*/"]
        first = "rest" if opened else f"({literal(think.start)} rest)?"
        return [f"start: {first} reply", *rest, r"gap: /\n{0,2}/"]

    def _calls(self, tools: tuple[Tool, ...], most: int) -> list[str]:
        before, between, after = _AROUND.get(self.family, ("", "", ""))
        literal = self._vocabulary_of().literal
        more = f"({literal(between)} call){{0,{most - 1}}}" if most > 1 and self.family in _AROUND else ""
        lines = [
            f"calls: {literal(before)} call {more} {literal(after)}",
            "call: " + " | ".join(f"call_{index}" for index in range(len(tools))),
        ]
        for index, tool in enumerate(tools):
            head, tail = (literal(text) for text in _call_text(self.family, tool.name))
            schema = schema_notation(_arguments_schema(tool), "tools", lenient=True)
            lines += [f"call_{index}: {head} arguments_{index} {tail}", f"arguments_{index}: {schema}"]
        return lines


_AROUND: Mapping[Family, tuple[str, str, str]] = {
    "hermes": ("", "\n", ""),
    "qwen-coder": ("", "\n", ""),
    "glm": ("", "\n", ""),
    "llama": ("", "; ", ""),
    "mistral": ("[TOOL_CALLS][", ", ", "]"),
    "mistral-header": ("", "", ""),
    "gemma": ("", "", ""),
    "function-gemma": ("", "", ""),
}
"""Text before the first call, between two, and behind the last. A family without an entry writes one call a reply."""


def _call_text(family: Family, name: str) -> tuple[str, str]:
    """What stands around a call's arguments where a grammar writes it. Every family's reader takes a call object, so
    the families with a notation of their own write one too: its arguments are JSON that a schema can hold."""
    quoted = _json(name)
    match family:
        case "llama":
            return f'{{"name": {quoted}, "parameters": ', "}"
        case "mistral":
            return f'{{"name": {quoted}, "arguments": ', "}"
        case "mistral-header":
            return f"[TOOL_CALLS]{name}[ARGS]", ""
        case "gpt-oss":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""
    opening, closing = TAGS[family]
    return f'{opening}\n{{"name": {quoted}, "arguments": ', f"}}\n{closing}"


def _arguments_schema(tool: Tool) -> Mapping[str, Any]:
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = tool.parameters.get("type", "object")
    if kind != "object":
        raise BadParameter(f"the parameters of {tool.name} are of type {shown(kind)}; they must be an object", "tools")
    return {**tool.parameters, "type": "object"}


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
