"""What a chat body demands of its reply: tools, tool_choice, response_format, thinking. Owns the meaning of those
fields; a schema's own faults are found where it becomes a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..chat.grammar import ANY_OBJECT
from ..chat.plan import ReplyRules
from ..chat.schema_words import refuse_unenforced
from ..chat.tools import NO_TOOLS, Tool, ToolUse, tools_of
from ..errors import BadParameter

if TYPE_CHECKING:
    from .fields import ChatRequest


def rules_of(ask: ChatRequest) -> ReplyRules:
    """Raises BadParameter, naming the field."""
    schema, strict = _schema(ask.response_format)
    if schema is not None:
        refuse_unenforced(schema, "response_format")
    tools = tools_of(ask.tools or ())
    _check_strict(tools)
    return ReplyRules(
        use=tool_use(tools, ask.tool_choice, ask.parallel_tool_calls is not False),
        schema=schema,
        strict=strict,
        split_thinking=ask.reasoning_format != "none",
    )


def tool_use(tools: tuple[Tool, ...], choice: Any, parallel: bool = True) -> ToolUse:
    """`choice` in any of OpenAI's shapes."""
    use = ToolUse(tools, parallel=parallel)
    match choice:
        case None | "auto":
            return use if tools else NO_TOOLS
        case "none":
            return NO_TOOLS
        case "required":
            return replace(use, required=_some(tools))
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return replace(use, named=_known(name, tools))
        case {"type": "allowed_tools", "allowed_tools": {"tools": list(allowed), **rest}}:
            return tool_use(_allowed(allowed, tools), rest.get("mode", "auto"), parallel)
    raise BadParameter(
        'tool_choice must be none, auto, required, or {"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


def thinking_kwargs(effort: Any, thinking: Any) -> dict[str, Any]:
    """Template variables for `reasoning_effort` and `thinking`; what no template could know is left out."""
    kwargs: dict[str, Any] = {}
    if isinstance(effort, str):
        kwargs["reasoning_effort"] = effort
    off = effort == "none" or (isinstance(thinking, Mapping) and thinking.get("type") == "disabled")
    on = isinstance(thinking, Mapping) and thinking.get("type") == "enabled"
    if off or on:
        kwargs |= {"enable_thinking": not off, "thinking": not off}
    return kwargs


def _check_strict(tools: tuple[Tool, ...]) -> None:
    """A tool's schema may ask for anything, unless it is said to be strict: agents send what they have."""
    for index, tool in enumerate(tools):
        if tool.parameters is not None and tool.spec["function"].get("strict"):
            refuse_unenforced(tool.parameters, f"tools[{index}].function.parameters")


def _some(tools: tuple[Tool, ...]) -> bool:
    if not tools:
        raise BadParameter("tool_choice is required, but there are no tools; send some", param="tool_choice")
    return True


def _known(name: str, tools: tuple[Tool, ...]) -> str:
    names = [tool.name for tool in tools]
    if name not in names:
        raise BadParameter(f"tool_choice names {name!r}; tools has {', '.join(names) or 'none'}", param="tool_choice")
    return name


def _allowed(allowed: list[Any], tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    names = {_known(tool["function"]["name"], tools) for tool in allowed if _is_function(tool)}
    return tuple(tool for tool in tools if tool.name in names)


def _is_function(tool: Any) -> bool:
    match tool:
        case {"function": {"name": str()}}:
            return True
    raise BadParameter("allowed_tools must list functions by name", param="tool_choice")


def _schema(response_format: Any) -> tuple[Mapping[str, Any] | None, bool]:
    """The schema the answer must follow, None for text; and whether no keyword of it may be ignored."""
    match response_format:
        case None | {"type": "text"}:
            return None, False
        case {"type": "json_object", "schema": dict(schema)}:
            return schema, False
        case {"type": "json_object"}:
            return ANY_OBJECT, False
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **rest}}:
            return schema, bool(rest.get("strict"))
        case {"type": "json_schema"}:
            raise BadParameter("response_format needs json_schema with a schema object", param="response_format")
    raise BadParameter("response_format must be of type text, json_object or json_schema", param="response_format")
