"""What a list of chat messages means: roles, content parts, tool calls. Owns the message rules that hold for every
model; never renders a template and never sees a token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import BadParameter

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
_MAY_BE_EMPTY = {"assistant", "tool"}


@dataclass(frozen=True, slots=True)
class Messages:
    """A conversation to be rendered by the model's own template.

    `messages` are dicts in the OpenAI chat shape. `template_kwargs` are extra variables of the template
    (enable_thinking, reasoning_effort, ...). `continue_final_message` lets the model go on in the last message, which
    must be the assistant's; it excludes `add_generation_prompt`.
    """

    messages: tuple[Mapping[str, Any], ...]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def turns_of(conversation: Messages) -> list[Turn]:
    """The conversation as plain turns: parts joined by a newline, tool arguments as objects, absent keys left out.

    Raises BadParameter, naming the place (`messages[2].content[0]`), for an unknown role, a part that is not text, or
    a shape no template could render.
    """
    if not conversation.messages:
        raise BadParameter("messages is empty; send at least one", param="messages")
    turns = [_turn(message, f"messages[{index}]") for index, message in enumerate(conversation.messages)]
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


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _turn(message: Mapping[str, Any], place: str) -> Turn:
    if not isinstance(message, Mapping):
        raise BadParameter(f"{place} is not an object", param=place)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadParameter(
            f"{place}.role is {role!r}; it must be one of {', '.join(sorted(_ROLES))}", param=f"{place}.role"
        )
    turn: Turn = {"role": _ROLES[role], "content": _text(message.get("content"), role, f"{place}.content")}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key) is not None:
            turn[key] = _string(message[key], f"{place}.{key}")
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
