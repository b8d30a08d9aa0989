"""One chat reply read: engine deltas in, chat deltas out. Owns the order thinking, answer, calls, what happens to
logprobs of held-back text, and the finish; never cancels and never words anything."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..engine.events import Delta
from ..sched.requests import FinishReason, TokenLogprob
from .deltas import ChatDelta, ChatFinish, Content
from .reasoning import ThinkTags, read_thinking
from .source import Out, Reading, Source, until
from .tools import NO_TOOLS, Family, ToolUse, read_calls
from .tools_harmony import read_harmony


@dataclass(frozen=True, slots=True)
class ReplySyntax:
    """What may stand in a reply's text. `family` is None where calls are not read, `think` where thinking is not;
    `opened`: the prompt opened the thinking. `harmony`: the reply is written in gpt-oss's messages. `own_stop`: a stop
    string that the client did not ask for."""

    family: Family | None = None
    use: ToolUse = NO_TOOLS
    think: ThinkTags | None = None
    opened: bool = False
    harmony: bool = False
    own_stop: str | None = None

    def read(self, source: Source, out: Out) -> Reading[None]:
        if self.harmony:
            yield from read_harmony(source, out, with_tools=self.family is not None)
            return
        if self.think is not None:
            yield from read_thinking(source, out, self.think, self.opened)
        if self.family is not None:
            yield from read_calls(self.family, source, out, self.use)
        else:
            yield from until(source, emit=out.content)


PLAIN = ReplySyntax()
"""All text is the answer."""


def call_id() -> str:
    """A fresh id of a tool call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


class ReplyReader:
    """Reads one reply; `read` is given its engine deltas in order. Where a reply is cut off by its length, a piece of
    markup at its end is neither content nor arguments; one that the model ends itself is kept to the letter."""

    def __init__(self, syntax: ReplySyntax, new_id: Callable[[], str] = call_id) -> None:
        self._syntax = syntax
        self._plain = syntax == PLAIN
        self._source = Source()
        self._out = Out(new_id, syntax.family is not None, syntax.use.most_calls)
        self._reading: Reading[None] | None = syntax.read(self._source, self._out)
        self._length = 0
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # (shown once so many characters are settled, entry)

    def read(self, delta: Delta) -> ChatDelta:
        """What `delta` adds."""
        if self._plain:  # the usual case, once a token: nothing is looked for, so nothing waits
            parts = (Content(delta.text),) if delta.text else ()
            return ChatDelta(delta, parts, delta.logprobs, 0, self._finish(delta), delta.stop_reason)
        self._length += len(delta.text)
        self._waiting.extend((self._length, entry) for entry in delta.logprobs or ())
        was_thinking, ended = self._out.thinking, delta.finish is not None
        if delta.text or ended:
            self._feed(delta)
        return ChatDelta(
            source=delta,
            parts=self._out.drain(),
            logprobs=None if delta.logprobs is None else self._settled(ended),
            num_reasoning=len(delta.token_ids) if was_thinking or self._out.thinking else 0,
            finish=self._finish(delta),
            stop_reason=None if delta.stop_reason == self._syntax.own_stop else delta.stop_reason,
        )

    def _feed(self, delta: Delta) -> None:
        self._source.unread += delta.text
        if delta.finish is FinishReason.LENGTH:
            self._resume()
            if self._source.drop():
                self._out.drop_space()
        self._source.ended = delta.finish is not None
        self._resume()
        if delta.finish:
            if self._out.in_call:
                self._out.end_call()
            self._out.finish()

    def _resume(self) -> None:
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None

    def _settled(self, ended: bool) -> tuple[TokenLogprob, ...]:
        """Entries whose text is out. They go with other text where their own is a tag."""
        done = []
        while self._waiting and (ended or self._waiting[0][0] <= self._source.settled):
            done.append(self._waiting.popleft()[1])
        return tuple(done)

    def _finish(self, delta: Delta) -> ChatFinish | None:
        match delta.finish:
            case FinishReason.LENGTH:
                return ChatFinish.LENGTH
            case FinishReason.STOP:
                called = self._out.calls and self._syntax.use.named is None
                return ChatFinish.TOOL_CALLS if called else ChatFinish.STOP
        return None
