"""A chat reply told apart: reasoning, content, tool calls. Owns the frozen types that readers make and dialects word;
knows no model's markup and no wire format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ..engine.events import Delta
from ..sched.requests import TokenLogprob


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the model's thinking, without its tags."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index` counts the reply's calls from 0 and rises; its arguments follow as CallArguments
    until the next CallStart or the end."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text. Concatenated they are an object, unless the model broke off or wrote
    something that is no JSON."""

    index: int
    text: str


Part = Reasoning | Content | CallStart | CallArguments


class ChatFinish(StrEnum):
    """Why a chat reply ended, in OpenAI's words. A call that the request named ends with STOP."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What one engine delta adds to a chat reply; the parts of a reply are the same however its text was split.

    `logprobs`, where asked for, are of the tokens whose text is out by now: held-back text keeps its entries back.
    The last one, and only it, has `finish`. `source` is the engine's delta: ids, progress, usage, timing. A source
    that failed or was cancelled has no `finish` here; ask `source.finish` first.
    `num_reasoning` of the source's ids are thinking. `stop_reason` is the stop string or id of the client's own that
    ended the reply.
    """

    source: Delta
    parts: tuple[Part, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    num_reasoning: int = 0
    finish: ChatFinish | None = None
    stop_reason: str | int | None = None
