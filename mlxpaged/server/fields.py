"""The bodies of the OpenAI endpoints and what their fields mean for sampling. Owns names, ranges and defaults;
unknown fields are ignored and null is the same as absent. Pure: bytes in, values out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from ..chat.messages import Messages
from ..chat.tools import Tool
from ..errors import BadParameter, RequestError, shown
from ..sched.requests import SamplingParams
from .reply_rules import thinking_kwargs

MAX_CHOICES = 8
MAX_REPLIES = 256
"""Replies one body may ask for: prompts times n."""
COMPLETION_MAX_TOKENS = 16
_MAX_COUNT = 2**31 - 1

_T = TypeVar("_T")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Shared(msgspec.Struct, kw_only=True):
    """What chat and plain completions have in common. The last three are extensions our own clients use:
    sampled ids in each choice, prefill progress as chunks of its own, timings in the last chunk."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None


class ChatRequest(Shared, kw_only=True):
    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    reasoning_format: str | None = None
    thinking: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None


class CompletionRequest(Shared, kw_only=True):
    prompt: Any
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    best_of: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Both dialects: llama.cpp's `content` and `add_special`, vLLM's `prompt` or `messages`."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ModelRequest(msgspec.Struct, kw_only=True):
    """A model to load or unload."""

    model: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


def parse(kind: type[_T], body: bytes) -> _T:
    """The body as `kind`. Raises RequestError, with the field's path as `param` where there is one."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        param = path.removesuffix("`").lstrip(".") or _missing_field(reason)
        place = f"{param}: " if param else "the body: "
        raise RequestError(place + reason[:1].lower() + reason[1:], param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error


def sampling_of(
    ask: Shared, defaults: Mapping[str, float], max_tokens: int | None, logprobs: int | None, least_tokens: int = 1
) -> SamplingParams:
    """How the replies are sampled; `defaults` are the model's own, for fields the body leaves out.

    Raises BadParameter for a value out of the API's range.
    """
    _in_range("temperature", ask.temperature, 0, 2)
    _in_range("top_p", ask.top_p, 0, 1)
    _in_range("max_tokens", max_tokens, least_tokens, None)
    _in_range("n", ask.n, 1, MAX_CHOICES)
    if ask.top_k is not None and ask.top_k < -1:
        raise BadParameter(f"top_k is {ask.top_k}; it must be 1 or more, or 0 or -1 for off", param="top_k")
    top_p = _first(ask.top_p, defaults.get("top_p"), 1.0)
    top_k = int(_first(ask.top_k, defaults.get("top_k"), 0))
    return SamplingParams(
        max_tokens=None if max_tokens is None else min(max_tokens, _MAX_COUNT),
        temperature=_first(ask.temperature, defaults.get("temperature"), 1.0),
        # A nucleus of nothing still holds the best token, which is what top_k 1 says.
        top_p=top_p if top_p > 0 else 1.0,
        top_k=min(max(top_k, 0), _MAX_COUNT) if top_p > 0 else 1,
        min_p=_first(ask.min_p, defaults.get("min_p"), 0.0),
        repetition_penalty=_first(ask.repetition_penalty, ask.repeat_penalty, defaults.get("repetition_penalty"), 1.0),
        presence_penalty=_first(ask.presence_penalty, 0.0),
        frequency_penalty=_first(ask.frequency_penalty, 0.0),
        logit_bias=_logit_bias(ask.logit_bias or {}),
        seed=ask.seed,
        stop=tuple(text for text in ([ask.stop] if isinstance(ask.stop, str) else ask.stop or ()) if text),
        stop_token_ids=tuple(ask.stop_token_ids or ()),
        min_tokens=min(_first(ask.min_tokens, 0), _MAX_COUNT),
        ignore_eos=bool(ask.ignore_eos),
        skip_special_tokens=_first(ask.skip_special_tokens, True),
        logprobs=logprobs,
    )


def chat_sampling(ask: ChatRequest, defaults: Mapping[str, float]) -> SamplingParams:
    """The sampling of a chat request, after the fields that only chat has were checked."""
    _check_stream_options(ask)
    if ask.top_logprobs is not None and not ask.logprobs:
        raise BadParameter("top_logprobs needs logprobs: true", param="top_logprobs")
    _in_range("top_logprobs", ask.top_logprobs, 0, 20)
    max_tokens = _first(ask.max_completion_tokens, ask.max_tokens, None)
    return sampling_of(ask, defaults, max_tokens, (ask.top_logprobs or 0) if ask.logprobs else None)


def completion_sampling(ask: CompletionRequest, defaults: Mapping[str, float]) -> SamplingParams:
    """The sampling of a plain completion, after the fields that only it has were checked."""
    _check_stream_options(ask)
    _in_range("logprobs", ask.logprobs, 0, 20)
    if ask.suffix:
        raise BadParameter("suffix is not supported: the model has no fill-in-the-middle tokens", param="suffix")
    if ask.best_of is not None and ask.best_of != (ask.n or 1):
        raise BadParameter(f"best_of is {ask.best_of}; it must equal n", param="best_of")
    sampling = sampling_of(ask, defaults, _first(ask.max_tokens, COMPLETION_MAX_TOKENS), ask.logprobs, least_tokens=0)
    return replace(sampling, continues_text=True, prompt_logprobs=ask.logprobs if ask.echo else None)


def conversation_of(ask: ChatRequest | TokenizeRequest, tools: Sequence[Tool] = ()) -> Messages:
    """The messages, the tools told to the model, and the template's variables. A final message to continue needs no
    generation prompt."""
    wished = thinking_kwargs(ask.reasoning_effort, ask.thinking) if isinstance(ask, ChatRequest) else {}
    extra = wished | (ask.chat_template_kwargs or {})
    return Messages(
        messages=tuple(ask.messages or ()),
        template_kwargs=extra,
        add_generation_prompt=_first(ask.add_generation_prompt, not ask.continue_final_message),
        continue_final_message=bool(ask.continue_final_message),
        tools=tuple(tool.spec for tool in tools),
    )


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a plain completion: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise BadParameter("prompt must be a text, a list of texts, token ids, or a list of those", param="prompt")
    if not prompt:
        raise BadParameter("prompt is an empty list; send at least one text or token id", param="prompt")
    if _are_ids(prompt):
        return [prompt]
    for index, item in enumerate(prompt):
        if not isinstance(item, str) and not (isinstance(item, list) and item and _are_ids(item)):
            raise BadParameter(
                f"prompt[{index}] must be a text or a list of at least one token id", param=f"prompt[{index}]"
            )
    return prompt


def _check_stream_options(ask: Shared) -> None:
    if ask.stream_options is not None and not ask.stream:
        raise BadParameter("stream_options needs stream: true", param="stream_options")


def _are_ids(items: Sequence[Any]) -> bool:
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return False
    if max(items) > _MAX_COUNT:
        raise BadParameter(f"token id {max(items)} is outside the vocabulary of any model", param="prompt")
    return True


def _logit_bias(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for token_id, bias in biases.items():
        if not re.fullmatch(r"[0-9]{1,10}", token_id):
            raise BadParameter(f"logit_bias has the key {shown(token_id)}; keys are token ids", param="logit_bias")
        _in_range(f"logit_bias of token {token_id}", bias, -100, 100, "logit_bias")
    return tuple((int(token_id), bias) for token_id, bias in biases.items())


def _in_range(name: str, value: float | None, least: float, most: float | None, param: str | None = None) -> None:
    if value is not None and (value < least or (most is not None and value > most)):
        allowed = f"from {least} to {most}" if most is not None else f"at least {least}"
        raise BadParameter(f"{name} is {value}; it must be {allowed}", param=param or name)


def _first(*values: Any) -> Any:
    """The first value that is not null; the last one otherwise."""
    return next((value for value in values if value is not None), values[-1])


def _missing_field(reason: str) -> str | None:
    found = re.search(r"missing required field `(\w+)`", reason)
    return found[1] if found else None
