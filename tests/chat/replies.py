"""Replies as models of each family write them, and what a reader makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxpaged.chat.deltas import CallArguments, CallStart, ChatFinish, Content, Part, Reasoning
from mlxpaged.chat.reader import ReplyReader, ReplySyntax
from mlxpaged.chat.reasoning import ThinkTags
from mlxpaged.chat.tools import Family, ToolUse, tools_of
from mlxpaged.engine.events import Delta
from mlxpaged.sched.requests import FinishReason

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = tools_of([WEATHER, NOW])
THINK = ThinkTags("<think>", "</think>")


@dataclass(frozen=True)
class Read:
    """A reply as a client puts it together."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish: ChatFinish | None = ChatFinish.STOP


def syntax_of(family: Family | None = "hermes", **more: object) -> ReplySyntax:
    harmony = family == "gpt-oss"
    defaults = {"use": ToolUse(TOOLS), "think": None if harmony else THINK, "harmony": harmony}
    return ReplySyntax(family=family, **(defaults | more))  # type: ignore[arg-type]


def put_together(parts: Sequence[Part], finish: ChatFinish | None) -> Read:
    """The parts' texts in one piece each; call indices must rise by one."""
    calls: list[list[str]] = []
    for part in parts:
        match part:
            case CallStart(index, call_id, name):
                assert index == len(calls) and call_id
                calls.append([name, ""])
            case CallArguments(index, text):
                assert index == len(calls) - 1 and text
                calls[index][1] += text
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return Read(reasoning, content, tuple((name, text) for name, text in calls), finish)


def read(pieces: Sequence[str], syntax: ReplySyntax, finish: FinishReason = FinishReason.STOP) -> Read:
    reader = ReplyReader(syntax)
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.read(Delta(text=piece)).parts
    last = reader.read(Delta(finish=finish))
    return put_together([*parts, *last.parts], last.finish)


CALLED = ChatFinish.TOOL_CALLS
PARIS = ("weather", '{"city": "Paris", "days": 3}')
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
HARMONY_CALL = (
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>'
)

REPLIES: dict[str, tuple[Family, str, Read]] = {
    "plain": ("hermes", "  a < b && c {d} \n", Read(content="  a < b && c {d} \n")),
    "thinking": ("hermes", "<think>\nWell </ then\n</think>\n\nYes.", Read("Well </ then", "Yes.")),
    "thinking then call": (
        "hermes",
        f"<think>hm</think>\nLet me see.\n{HERMES}\n",
        Read("hm", "Let me see.", (PARIS,), CALLED),
    ),
    "two calls": (
        "hermes",
        HERMES + '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        Read(calls=(PARIS, ("now", "{}")), finish=CALLED),
    ),
    "text behind a call": ("hermes", HERMES + "\nDone.", Read("", "Done.", (PARIS,), CALLED)),
    "arguments first": (
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris", "days": 3}, "name": "weather"}</tool_call>',
        Read(calls=(PARIS,), finish=CALLED),
    ),
    "arguments as a string": (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}</tool_call>',
        Read(calls=(PARIS,), finish=CALLED),
    ),
    "no end tag": ("hermes", HERMES.removesuffix("\n</tool_call>"), Read(calls=(PARIS,), finish=CALLED)),
    "a brace missing": ("hermes", HERMES.replace("}}", "}"), Read(calls=(PARIS,), finish=CALLED)),
    "a brace too many": ("hermes", HERMES.replace("}}", "}}}"), Read(calls=(PARIS,), finish=CALLED)),
    "markup in a string": (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>\\n\\"}", "days": 3}}</tool_call>',
        Read(calls=(("weather", '{"city": "</tool_call>\\n\\"}", "days": 3}'),), finish=CALLED),
    ),
    "qwen-coder": (
        "qwen-coder",
        "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>"
        "\n</function>\n</tool_call>",
        Read("", "Sure.", (PARIS,), CALLED),
    ),
    "qwen-coder text": (
        "qwen-coder",
        '<tool_call><function=weather><parameter=city>\nif a < "b":\n  </x>\n</parameter></function></tool_call>'
        "<tool_call><function=now></function></tool_call>",
        Read(calls=(("weather", '{"city": "if a < \\"b\\":\\n  </x>"}'), ("now", "{}")), finish=CALLED),
    ),
    "glm": (
        "glm",
        "<think>x</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call><tool_call>now</tool_call>",
        Read("x", "", (PARIS, ("now", "{}")), CALLED),
    ),
    "gemma": (
        "gemma",
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>',
        Read(calls=(PARIS, ("now", "{}")), finish=CALLED),
    ),
    "gemma nested": (
        "gemma",
        '<|tool_call>call:f{a:[1,<|"|>x, {y<|"|>,{b:true,c:word}],d:{},e:-1.5e3}<tool_call|>',
        Read(calls=(("f", '{"a": [1, "x, {y", {"b": true, "c": "word"}], "d": {}, "e": -1500.0}'),), finish=CALLED),
    ),
    "function-gemma": (
        "function-gemma",
        "<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
        Read(calls=(PARIS,), finish=CALLED),
    ),
    "llama": (
        "llama",
        '\n{"name": "weather", "parameters": {"city": "Paris", "days": 3}}; {"name": "now", "parameters": {}}',
        Read(calls=(PARIS, ("now", "{}")), finish=CALLED),
    ),
    "llama python tag": (
        "llama",
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Paris", "days": 3}}',
        Read(calls=(PARIS,), finish=CALLED),
    ),
    "mistral list": (
        "mistral",
        'So: [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 3}, "id": "abcdefghi"}, '
        '{"name": "now", "arguments": {}}]',
        Read("", "So:", (PARIS, ("now", "{}")), CALLED),
    ),
    "mistral header": (
        "mistral-header",
        '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}',
        Read(calls=(PARIS, ("now", "{}")), finish=CALLED),
    ),
    "gpt-oss": (
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant{HARMONY_CALL}",
        Read("Hm.", "I look.", (PARIS,), CALLED),
    ),
    "gpt-oss recipient first": (
        "gpt-oss",
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris", "days": 3}<|call|>',
        Read(calls=(PARIS,), finish=CALLED),
    ),
    "gpt-oss answer": (
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes <b>.",
        Read("Hm.", "Yes <b>."),
    ),
    "gpt-oss without marks": ("gpt-oss", "to be, or not", Read(content="to be, or not")),
}
"""Name -> the family, a reply's text, and the parts it holds."""

BROKEN: dict[str, tuple[Family, str]] = {
    "no JSON": ("hermes", "a <tool_call>\nweather in Paris\n</tool_call> b"),
    "a bare word": ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": Paris}}\n</tool_call>'),
    "no name": ("hermes", '<tool_call>{"arguments": {"city": "Paris"}}</tool_call>'),
    "a name with spaces": ("hermes", '<tool_call>{"name": "the weather", "arguments": {}}</tool_call>'),
    "arguments that are a list": ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    "an unfinished tag": ("hermes", "a <tool_cal"),
    "an unfinished name": ("hermes", '<tool_call>\n{"name": "wea'),
    "no function": ("qwen-coder", "<tool_call>\n<function>weather</function>\n</tool_call>"),
    "a sentence": ("glm", "<tool_call>weather in Paris</tool_call>"),
    "no call": ("gemma", "<|tool_call>weather{}<tool_call|>"),
    "an unknown tool": ("llama", '{"name": "Ada", "parameters": {"born": 1815}}'),
    "other JSON": ("llama", '{"city": "Paris"}'),
    "code": ("llama", '<|python_tag|>print("hello")'),
    "a mark without a call": ("mistral", "see [TOOL_CALLS] above"),
}
"""Name -> the family, and text that is no call: all of it is content."""
