"""How `/v1/chat/completions` words a reply: thinking, answer and tool calls as deltas or as one message. Pure
translation from what a ReplyReader made of the engine's deltas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..chat.deltas import CallArguments, CallStart, ChatDelta, Content, Part, Reasoning
from ..chat.reader import PLAIN, ReplyReader, ReplySyntax
from ..engine.events import Delta
from ..sched.requests import TokenLogprob
from .openai import LEAST_LOGPROB, Asked, Choice, Dialect, TokenBytes, token_text


class ChatDialect(Dialect):
    """`/v1/chat/completions`. `syntax` is how the replies are to be read."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, asked: Asked, token_bytes: TokenBytes, syntax: ReplySyntax = PLAIN) -> None:
        super().__init__(asked, token_bytes)
        self._readers = [ReplyReader(syntax) for _ in self._choices]
        self._messages = [_Message() for _ in self._choices]

    def opening(self) -> Iterator[bytes]:
        for index in range(len(self._choices)):
            yield self._chunk(
                index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            )

    def event(self, index: int, delta: Delta) -> Iterator[bytes]:
        """One chunk for each part, so that thinking, answer and calls never share one."""
        yield from self._progress_event(delta)
        read = self._readers[index].read(delta)
        words = [_words(part) for part in read.parts]
        extra = self._token_ids(delta)
        if not words and (read.logprobs or extra):
            words = [{"content": ""}]
        entries: Sequence[TokenLogprob] = read.logprobs or ()
        for piece in words:
            fields = {"delta": piece, "logprobs": self._logprobs(entries), "finish_reason": None} | extra
            yield self._chunk(index, fields, delta)
            entries, extra = (), {}
        self._remember(index, read)
        if read.finish:
            ending: dict[str, Any] = {"delta": {}, "logprobs": None, "finish_reason": read.finish.value}
            stopped = {} if read.stop_reason is None else {"stop_reason": read.stop_reason}
            yield self._chunk(index, ending | stopped, delta)

    def take(self, index: int, delta: Delta) -> None:
        self._remember(index, self._readers[index].read(delta))

    def _remember(self, index: int, read: ChatDelta) -> None:
        choice = self._choices[index]
        choice.add(read.source)
        self._messages[index].add(read)
        if read.finish:
            choice.finish, choice.stop_reason = read.finish.value, read.stop_reason

    def _message(self, index: int, choice: Choice) -> dict[str, Any]:
        return {"message": self._messages[index].body(), "logprobs": self._logprobs(choice.logprobs)}

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if thought := sum(message.num_reasoning for message in self._messages):
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        return usage

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        content = [
            {**self._entry(entry.token_id, entry.logprob), "top_logprobs": [self._entry(*top) for top in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._token_bytes(token_id)
        return {"token": token_text(raw), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}


class _Message:
    """One choice's message so far."""

    def __init__(self) -> None:
        self.num_reasoning = 0
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []

    def add(self, read: ChatDelta) -> None:
        self.num_reasoning += read.num_reasoning
        for part in read.parts:
            match part:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallStart():
                    self._calls.append((part, []))
                case CallArguments(index, text):
                    self._calls[index][1].append(text)

    def body(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [_call(start, "".join(texts)) for start, texts in self._calls]
        return message


def _words(part: Part) -> dict[str, Any]:
    """One part as a delta."""
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index):
            return {"tool_calls": [{"index": index, **_call(part, "")}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _call(start: CallStart, arguments: str) -> dict[str, Any]:
    return {"id": start.call_id, "type": "function", "function": {"name": start.name, "arguments": arguments}}
