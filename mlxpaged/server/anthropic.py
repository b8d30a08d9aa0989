"""How Anthropic's messages endpoint words a reply: content blocks that open, grow and close, or one message. Pure
translation from what a ReplyReader made of the engine's deltas.

The rules that clients break on: every event has its name in an `event:` line; message_start carries usage; each block
has an index of its own and is closed before the next one opens; message_delta carries the stop reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..chat.deltas import CallArguments, CallStart, ChatFinish, Content, Part, Reasoning
from ..chat.reader import PLAIN, ReplyReader, ReplySyntax
from ..engine.events import Delta, Usage
from ..errors import MlxpagedError
from .errors import body_of, for_path
from .sse import event

MESSAGES = "/messages"


@dataclass(frozen=True, slots=True)
class MessageHead:
    """What the message says of itself. `num_prompt` is the length of the prompt in tokens."""

    id: str
    model: str
    num_prompt: int


def error_event(error: MlxpagedError) -> bytes:
    """What ends a stream that breaks."""
    status, body = body_of(error)
    return event(for_path(MESSAGES, status, body), "error")


class AnthropicDialect:
    """`/v1/messages`: one reply to one prompt, read by `syntax`."""

    def __init__(self, head: MessageHead, syntax: ReplySyntax = PLAIN) -> None:
        self._head = head
        self._reader = ReplyReader(syntax)
        self._blocks: list[_Block] = []
        self._open = False
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._usage: Usage | None = None

    def opening(self) -> Iterator[bytes]:
        yield _event("message_start", message=self.body())

    def event(self, index: int, delta: Delta) -> Iterator[bytes]:
        """The events of one delta: what it adds to the open block, or closes and opens."""
        parts = self._read(delta)
        for part in parts:
            if _begins(part, self._blocks[-1] if self._open else None):
                yield from self._close()
                self._blocks.append(_Block.of(part))
                self._open = True
                yield _event("content_block_start", index=self._last, content_block=self._blocks[-1].body())
            if not isinstance(part, CallStart):
                self._blocks[-1].texts.append(part.text)
                yield _event("content_block_delta", index=self._last, delta=_words(part))
        if delta.finish:
            yield from self._close()

    def take(self, index: int, delta: Delta) -> None:
        for part in self._read(delta):
            if not self._blocks or _begins(part, self._blocks[-1]):
                self._blocks.append(_Block.of(part))
            if not isinstance(part, CallStart):
                self._blocks[-1].texts.append(part.text)

    def closing(self) -> Iterator[bytes]:
        yield _event("message_delta", delta=self._stop, usage=self._counts())
        yield _event("message_stop")

    def body(self) -> dict[str, Any]:
        """The message as far as it came."""
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": [block.body() for block in self._blocks],
            **self._stop,
            "usage": self._counts(),
        }

    @property
    def _last(self) -> int:
        return len(self._blocks) - 1

    def _read(self, delta: Delta) -> Sequence[Part]:
        read = self._reader.read(delta)
        if read.finish:
            self._usage = delta.usage
            self._stop = self._stopped(read.finish, read.stop_reason)
        return read.parts

    def _close(self) -> Iterator[bytes]:
        if self._open:
            self._open = False
            yield _event("content_block_stop", index=self._last)

    def _stopped(self, finish: ChatFinish, stop_reason: str | int | None) -> dict[str, Any]:
        if isinstance(stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        called = finish is ChatFinish.TOOL_CALLS or any(block.call for block in self._blocks)
        reason = "max_tokens" if finish is ChatFinish.LENGTH else "tool_use" if called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _counts(self) -> dict[str, int]:
        """Anthropic counts the cached part of a prompt apart from the rest."""
        usage = self._usage or Usage(self._head.num_prompt, 0, 0)
        return {
            "input_tokens": self._head.num_prompt - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


@dataclass(slots=True)
class _Block:
    """One content block so far; `call` is set for a tool's."""

    kind: str
    texts: list[str]
    call: CallStart | None = None

    @classmethod
    def of(cls, part: Part) -> _Block:
        kind = {Reasoning: "thinking", Content: "text"}.get(type(part), "tool_use")
        return cls(kind, [], part if isinstance(part, CallStart) else None)

    def body(self) -> dict[str, Any]:
        text = "".join(self.texts)
        if self.call:
            return {"type": "tool_use", "id": self.call.call_id, "name": self.call.name, "input": _object(text)}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": ""}
        return {"type": "text", "text": text}


def _begins(part: Part, block: _Block | None) -> bool:
    """Whether `part` opens a block of its own."""
    match part:
        case Reasoning():
            return block is None or block.kind != "thinking"
        case Content():
            return block is None or block.kind != "text"
        case CallArguments():
            return False
    return True


def _words(part: Reasoning | Content | CallArguments) -> dict[str, str]:
    match part:
        case Reasoning(text):
            return {"type": "thinking_delta", "thinking": text}
        case Content(text):
            return {"type": "text_delta", "text": text}
        case CallArguments(_, text):
            return {"type": "input_json_delta", "partial_json": text}


def _object(text: str) -> dict[str, Any]:
    """A call's arguments as the object they must be here; what is no object is kept as text under `arguments`."""
    try:
        found = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": text}
    return found if isinstance(found, dict) else {"arguments": text}


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)
