"""The body of Anthropic's messages endpoint, and what it means in the terms of a chat request. Pure: values in, values
out; fields nobody here needs are ignored and null is the same as absent."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ..errors import BadParameter
from .fields import ChatRequest

_log = logging.getLogger(__name__)

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"thinking": "thinking", "redacted_thinking": ""}


class MessagesRequest(msgspec.Struct, kw_only=True):
    """`max_tokens` is required by the API's text; clients that leave it out get what the context holds."""

    messages: list[Any]
    model: str | None = None
    system: str | list[Any] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


def chat_request(ask: MessagesRequest) -> ChatRequest:
    """The same request in OpenAI's shape. A last message of the assistant is one to go on from, as Anthropic has it.

    Raises BadParameter, naming the place, for what a text model cannot read or the shape does not allow.
    """
    messages = [turn for index, message in enumerate(ask.messages) for turn in _turns(message, f"messages[{index}]")]
    if ask.system:
        messages.insert(0, {"role": "system", "content": _text(ask.system, "system")})
    goes_on = bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    choice, parallel = _tool_choice(ask.tool_choice or {"type": "auto"})
    return ChatRequest(
        messages=messages,
        model=ask.model,
        stream=ask.stream,
        max_tokens=ask.max_tokens,
        temperature=ask.temperature,
        top_p=ask.top_p,
        top_k=ask.top_k,
        stop=ask.stop_sequences,
        tools=[tool for index, given in enumerate(ask.tools or ()) for tool in _tool(given, f"tools[{index}]")],
        tool_choice=choice,
        parallel_tool_calls=parallel,
        thinking=ask.thinking,
        continue_final_message=goes_on,
    )


def _turns(message: Any, place: str) -> Iterator[dict[str, Any]]:
    """One message as one or more turns: the results of tools come before what the user says beside them."""
    match message:
        case {"role": "user", "content": list(blocks)}:
            results = [block for block in blocks if _kind(block) == "tool_result"]
            for block in results:
                yield _tool_result(block, f"{place}.content")
            if rest := [block for block in blocks if _kind(block) != "tool_result"]:
                yield {"role": "user", "content": _text(rest, f"{place}.content")}
            elif not results:
                yield {"role": "user", "content": ""}
        case {"role": "assistant", "content": list(blocks)}:
            yield _assistant(blocks, f"{place}.content")
        case {"role": "user" | "assistant" | "system" as role, "content": content}:
            yield {"role": role, "content": _text(content, f"{place}.content")}
        case _:
            raise BadParameter(f"{place} needs a role (user or assistant) and a content", param=place)


def _assistant(blocks: list[Any], place: str) -> dict[str, Any]:
    calls, thoughts, texts = [], [], []
    for index, block in enumerate(blocks):
        kind = _kind(block)
        if kind == "tool_use":
            calls.append(_call(block, f"{place}[{index}]"))
        elif kind in _THINKING:
            thoughts.append(str(block.get(_THINKING[kind]) or ""))
        else:
            texts.append(block)
    turn: dict[str, Any] = {"role": "assistant", "content": _text(texts, place)}
    if thought := "".join(thoughts):
        turn["reasoning_content"] = thought
    if calls:
        turn["tool_calls"] = calls
    return turn


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    match block:
        case {"id": str(call_id), "name": str(name)}:
            arguments = block.get("input") or {}
            return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    raise BadParameter(f"{place} needs an id and a name", param=place)


def _tool_result(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str):
        raise BadParameter(f"a tool_result in {place} needs a tool_use_id", param=place)
    text = _text(block.get("content") or "", place)
    return {"role": "tool", "tool_call_id": call_id, "content": f"Error: {text}" if block.get("is_error") else text}


def _text(content: Any, place: str) -> str:
    """A text, or the texts of blocks, one a line."""
    match content:
        case str():
            return content
        case list():
            return "\n".join(_block_text(block, f"{place}[{index}]") for index, block in enumerate(content))
    raise BadParameter(f"{place} must be a text or a list of blocks", param=place)


def _block_text(block: Any, place: str) -> str:
    match block:
        case str():
            return block
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return text
        case {"type": str(kind)}:
            raise BadParameter(
                f"{place} is a block of type {kind!r}, but the model reads text only; send text", param=place
            )
    raise BadParameter(f"{place} must be a text block", param=place)


def _kind(block: Any) -> str:
    return str(block.get("type")) if isinstance(block, Mapping) else ""


def _tool(tool: Any, place: str) -> list[dict[str, Any]]:
    """A tool in OpenAI's shape; none for a tool that Anthropic's own servers would run."""
    match tool:
        case {"name": str(name), "input_schema": dict(schema)}:
            function = {"name": name, "description": tool.get("description") or "", "parameters": schema}
            return [{"type": "function", "function": function}]
        case {"type": str(kind), "name": str()} if kind != "custom":
            _log.warning("a request offers the tool %s, which only Anthropic runs: left out", kind[:40])
            return []
    raise BadParameter(f"{place} needs a name and an input_schema", param=place)


def _tool_choice(choice: Mapping[str, Any]) -> tuple[Any, bool]:
    """(tool_choice, parallel_tool_calls)."""
    parallel = not choice.get("disable_parallel_tool_use")
    match choice:
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}, parallel
        case {"type": "auto" | "any" | "none" as kind}:
            return _CHOICES[kind], parallel
    raise BadParameter("tool_choice must be of type auto, any, none, or tool with a name", param="tool_choice")
