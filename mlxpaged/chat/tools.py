"""Tool calls by model family. Owns which markup a model writes calls in, by its template or vocabulary, and what a
request may say about tools; the state machines are in tools_json, tools_markup and tools_harmony."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import BadParameter
from .source import Out, Reading, Source
from .tools_harmony import read_harmony
from .tools_json import NAME, call_object, read_llama, read_mistral
from .tools_markup import read_gemma, read_glm, read_qwen_coder, read_tagged

Family = Literal[
    "hermes", "qwen-coder", "glm", "gemma", "function-gemma", "llama", "mistral", "mistral-header", "gpt-oss"
]

MAX_TOOLS = 512
MAX_CALLS = 8
"""Calls one reply may hold where a grammar writes them."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function the model may call. `parameters` is its JSON schema, None for a function without any; `spec` is
    the tool as the request and the template have it."""

    name: str
    parameters: Mapping[str, Any] | None
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about tools: which there are, whether one must be called, and whether several may be.
    `named` implies that exactly this one is called."""

    tools: tuple[Tool, ...] = ()
    required: bool = False
    named: str | None = None
    parallel: bool = True

    @property
    def forced(self) -> tuple[Tool, ...]:
        """The tools of which one must be called; none where the model is free."""
        if self.named is not None:
            return tuple(tool for tool in self.tools if tool.name == self.named)
        return self.tools if self.required else ()

    @property
    def most_calls(self) -> int | None:
        """Calls after which nothing more is read."""
        return None if self.parallel and self.named is None else 1


NO_TOOLS = ToolUse()


def tools_of(specs: Any) -> tuple[Tool, ...]:
    """Tools in the OpenAI shape. Raises BadParameter, naming the place, for anything else."""
    if not isinstance(specs, list | tuple):
        raise BadParameter("tools must be a list", param="tools")
    if len(specs) > MAX_TOOLS:
        raise BadParameter(f"there are {len(specs)} tools; send at most {MAX_TOOLS}", param="tools")
    tools = [_tool(spec, f"tools[{index}]") for index, spec in enumerate(specs)]
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadParameter(f"tools has {twice!r} more than once; give each function its own name", param="tools")
    return tuple(tools)


def _tool(spec: Any, place: str) -> Tool:
    match spec:
        case {"type": "function", "function": {"name": str(name)} as function} if name:
            if not NAME.fullmatch(name):
                raise BadParameter(
                    f"{place} is called {name[:60]!r}; use up to 128 letters, digits and _ - . : /", param=place
                )
            parameters = function.get("parameters")
            if parameters is not None and not isinstance(parameters, Mapping):
                raise BadParameter(f"{place}.function.parameters must be a JSON schema", param=place)
            return Tool(name, parameters, spec)
        case {"type": "function"}:
            raise BadParameter(f"{place} needs a function with a name", param=place)
    raise BadParameter(f'{place} must be of type "function"; other kinds are not supported', param=place)


_BY_TEMPLATE: tuple[tuple[str, Family], ...] = (
    ("<|channel|>", "gpt-oss"),
    ("<|tool_call>", "gemma"),
    ("<start_function_call>", "function-gemma"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen-coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama"),
    ("<|start_header_id|>", "llama"),
)


def family_of(template: str, is_token: Callable[[str], bool]) -> Family:
    """The markup of a model's calls. `is_token`: whether a text is one token of its vocabulary. A model whose files
    name none is told to write hermes's, the most common one."""
    for mark, family in _BY_TEMPLATE:
        if mark in template:
            return "mistral-header" if family == "mistral" and "[ARGS]" in template else family
    if is_token("[TOOL_CALLS]"):
        return "mistral-header" if is_token("[ARGS]") else "mistral"
    return "llama" if is_token("<|python_tag|>") else "hermes"


TAGS: Mapping[Family, tuple[str, str]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen-coder": ("<tool_call>", "</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>"),
    "gemma": ("<|tool_call>", "<tool_call|>"),
    "function-gemma": ("<start_function_call>", "<end_function_call>"),
}
_GEMMA_QUOTES: Mapping[Family, str] = {"gemma": '<|"|>', "function-gemma": "<escape>"}

MARKS: Mapping[Family, tuple[str, ...]] = {
    **TAGS,
    "gemma": (*TAGS["gemma"], _GEMMA_QUOTES["gemma"]),
    "function-gemma": (*TAGS["function-gemma"], _GEMMA_QUOTES["function-gemma"]),
    "llama": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "mistral-header": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "gpt-oss": (),
}
"""Texts that the family's reader must see also where they are special tokens."""


def read_calls(family: Family, source: Source, out: Out, use: ToolUse) -> Reading[None]:
    """The answer of a reply, with its calls."""
    properties = {
        tool.name: {key: value for key, value in _properties(tool).items() if isinstance(value, Mapping)}
        for tool in use.tools
    }
    match family:
        case "llama":
            return read_llama(source, out, properties.keys())
        case "mistral" | "mistral-header":
            return read_mistral(source, out)
        case "gpt-oss":
            return read_harmony(source, out, with_tools=True)
        case "qwen-coder":
            return read_tagged(source, out, TAGS[family], lambda s, o: read_qwen_coder(s, o, properties))
        case "glm":
            return read_tagged(source, out, TAGS[family], lambda s, o: read_glm(s, o, properties))
        case "gemma" | "function-gemma":
            quote = _GEMMA_QUOTES[family]
            return read_tagged(source, out, TAGS[family], lambda s, o: read_gemma(s, o, quote))
        case "hermes":
            return read_tagged(source, out, TAGS[family], call_object)


def _properties(tool: Tool) -> Mapping[str, Any]:
    found = (tool.parameters or {}).get("properties")
    return found if isinstance(found, Mapping) else {}
