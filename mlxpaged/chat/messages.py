"""What a list of chat messages means: roles, content parts, tool calls. Owns the message rules that hold for every
model; never renders a template and never sees a token."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import BadParameter, shown

Turn = dict[str, Any]
"""One message as a template sees it: `role` and `content` are always strings."""

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_BILLING_HEADER = re.compile(r"(?mi)^x-anthropic-billing-header:.*(\n+|\Z)")
"""A line that Claude Code puts into its system text: it changes with each call and would end every prefix match."""

_MAY_BE_EMPTY = {"assistant", "tool"}


@dataclass(frozen=True, slots=True)
class Messages:
    """A conversation to be rendered by the model's own template.

    `messages` are dicts in the OpenAI chat shape, and so are `tools`, which the model may call. `template_kwargs` are
    extra variables of the template (enable_thinking, reasoning_effort, ...). `continue_final_message` lets the model go
    on in the last message, which must be the assistant's; it excludes `add_generation_prompt`.
    """

    messages: tuple[Mapping[str, Any], ...]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()


def turns_of(conversation: Messages) -> list[Turn]:
    """The conversation as plain turns: parts joined by a newline, tool arguments as objects, absent keys left out.

    Raises BadParameter, naming the place (`messages[2].content[0]`), for an unknown role, a part that is not text, or
    a shape no template could render.
    """
    if not conversation.messages:
        raise BadParameter("messages is empty; send at least one", param="messages")
    turns = [_turn(message, f"messages[{index}]") for index, message in enumerate(conversation.messages)]
    if turns[0]["role"] in {"system", "developer"}:
        turns[0]["content"] = _BILLING_HEADER.sub("", turns[0]["content"])
    if conversation.continue_final_message:
        if conversation.add_generation_prompt:
            raise BadParameter(
                "continue_final_message and add_generation_prompt are both true; choose one",
                param="continue_final_message",
            )
        if turns[-1]["role"] != "assistant":
            raise BadParameter(
                f"continue_final_message needs an assistant message at the end; the last role is {turns[-1]['role']!r}",
                param="continue_final_message",
            )
    return turns


def merge_neighbours(turns: Sequence[Turn]) -> list[Turn]:
    """Consecutive turns of one role as one, their texts apart by an empty line; tool traffic is left alone."""
    merged: list[Turn] = []
    for turn in turns:
        before = merged[-1] if merged else None
        if before and before["role"] == turn["role"] != "tool" and not ("tool_calls" in before or "tool_calls" in turn):
            merged[-1] = {**before, "content": _joined(before["content"], turn["content"])}
        else:
            merged.append(turn)
    return merged


def fold_system(turns: Sequence[Turn]) -> list[Turn]:
    """Every system text put in front of the next user turn, or into a user turn of its own when none follows."""
    folded: list[Turn] = []
    waiting = ""
    for turn in turns:
        if turn["role"] in {"system", "developer"}:
            waiting = _joined(waiting, turn["content"])
        elif turn["role"] == "user" and waiting:
            folded.append({**turn, "content": _joined(waiting, turn["content"])})
            waiting = ""
        else:
            folded.append(turn)
    if waiting:
        folded.append({"role": "user", "content": waiting})
    return folded


def tools_as_text(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """For a template that knows no tools: they are described in the system message, calls are written into the
    assistant's text and results into the user's, all as Hermes models have it."""
    told: list[Turn] = []
    for turn in turns:
        if turn["role"] == "tool":
            told.append({"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"})
        elif calls := turn.get("tool_calls"):
            texts = [f"<tool_call>\n{_json(_call(call['function']))}\n</tool_call>" for call in calls]
            plain = {key: value for key, value in turn.items() if key != "tool_calls"}
            told.append({**plain, "content": "\n".join(text for text in (turn["content"], *texts) if text)})
        else:
            told.append(turn)
    if not tools:
        return told
    system = _TOOL_PROMPT.format("\n".join(_json(tool.get("function", tool)) for tool in tools))
    if told and told[0]["role"] in {"system", "developer"}:
        return [{**told[0], "content": _joined(told[0]["content"], system)}, *told[1:]]
    return [{"role": "system", "content": system}, *told]


_TOOL_PROMPT = """You can call functions. Each is described by a JSON object:
<tools>
{}
</tools>
To call one, answer with its name and its arguments as JSON between two tags, like this:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": function["arguments"]}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _turn(message: Mapping[str, Any], place: str) -> Turn:
    if not isinstance(message, Mapping):
        raise BadParameter(f"{place} is not an object", param=place)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadParameter(
            f"{place}.role is {shown(role)}; it must be one of {', '.join(sorted(_ROLES))}", param=f"{place}.role"
        )
    turn: Turn = {"role": _ROLES[role], "content": _text(message.get("content"), role, f"{place}.content")}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key) is not None:
            turn[key] = _string(message[key], f"{place}.{key}")
    if isinstance(message.get("reasoning"), str):  # what some servers call it
        turn.setdefault("reasoning_content", message["reasoning"])
    if message.get("tool_calls"):
        turn["tool_calls"] = _tool_calls(message["tool_calls"], f"{place}.tool_calls")
    return turn


def _text(content: Any, role: str, place: str) -> str:
    match content:
        case str():
            return content
        case None if role in _MAY_BE_EMPTY:
            return ""
        case list():
            return "\n".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))
    raise BadParameter(f"{place} must be a text or a list of text parts", param=place)


def _part(part: Any, place: str) -> str:
    match part:
        case str():
            return part
        case {"type": str(kind)} if kind in _TEXT_PARTS:
            return _string(part.get(_TEXT_PARTS[kind]), f"{place}.{_TEXT_PARTS[kind]}")
        case {"type": str(kind)}:
            raise BadParameter(
                f"{place} is a part of type {kind!r}, but the model reads text only; send text parts", param=place
            )
    raise BadParameter(f"{place} must be a text part", param=place)


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadParameter(f"{place} must be a list", param=place)
    cleaned = []
    for index, call in enumerate(calls):
        match call:
            case {"function": {"name": str()} as function}:
                cleaned.append({**call, "type": "function", "function": _function(function)})
            case _:
                raise BadParameter(f"{place}[{index}] needs a function with a name", param=f"{place}[{index}]")
    return cleaned


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as an object, which is what templates expect; a text that is not JSON goes through as it is."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    return {**function, "arguments": {} if arguments is None else arguments}


def _string(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise BadParameter(f"{place} must be a text", param=place)
    return value
