"""A reply's text as it comes, and the parts found in it so far. Owns what is held back and the way back from a guess
that failed; knows no model's markup.

The state machines over a reply are generators: each reads `source`, writes `out`, and yields where the text read so
far decides nothing more. They look at characters, never at where a piece of text began, so that every way to split a
reply gives the same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from .deltas import CallArguments, CallStart, Content, Part, Reasoning

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
"""A state machine: resumed when there is more text, or once more when the text has ended."""


class Broken(Exception):
    """The text is not what the machine took it for."""


class Source:
    """Text to be read. `ended` is set with the last piece."""

    def __init__(self) -> None:
        self.unread = ""
        self.ended = False
        self._taken = 0
        self._since: list[str] | None = None
        self._mark = 0

    @property
    def settled(self) -> int:
        """Characters that no later text can bring back."""
        return self._taken if self._since is None else self._mark

    def take(self, size: int) -> str:
        """The next characters."""
        piece, self.unread = self.unread[:size], self.unread[size:]
        self._taken += len(piece)
        if self._since is not None:
            self._since.append(piece)
        return piece

    def mark(self) -> None:
        """From here on the text may turn out to be something else."""
        self._since, self._mark = [], self._taken

    def settle(self) -> None:
        """It was what it seemed."""
        self._since = None

    def rewind(self) -> None:
        """Back to the mark."""
        if self._since is not None:
            back = "".join(self._since)
            self.unread, self._taken = back + self.unread, self._taken - len(back)
            self._since = None

    def drop(self) -> bool:
        """The reply was cut in the middle of what could still become markup: that is gone. Whether there was any."""
        some = bool(self.unread) or (self._since is not None and self._taken > self._mark)
        self._taken += len(self.unread)
        self.unread, self._since = "", None
        return some


class Out:
    """Parts of one reply. White space at the end of content waits: before a call, or after the last one, it means
    nothing. `with_calls` False: there are none, so it does not wait.

    `new_id` makes the ids of calls; `most_calls` drops all that follows so many (None: no limit).
    """

    def __init__(self, new_id: Callable[[], str], with_calls: bool = True, most_calls: int | None = None) -> None:
        self.calls = 0
        self.in_call = False
        self.thinking = False
        self._new_id, self._with_calls, self._most_calls = new_id, with_calls, most_calls
        self._parts: list[Part] = []
        self._space = ""
        self._fresh = False  # nothing but space has followed the thinking or the last call

    def drain(self) -> tuple[Part, ...]:
        """The parts since the last time, neighbours of one kind as one."""
        parts, self._parts = tuple(self._parts), []
        return parts

    def content(self, text: str) -> None:
        if self._full and not self.in_call:
            return
        body = text.rstrip() if self._with_calls or self._fresh else text
        if not body:
            self._space += text
            return
        said = body.lstrip() if self._fresh else self._space + body
        self._space, self._fresh = text[len(body) :], False
        self._add(Content(said))

    def reasoning(self, text: str) -> None:
        self.thinking = True
        if text:
            self._add(Reasoning(text))

    def end_reasoning(self) -> None:
        """What follows is the answer; the space before it belongs to neither."""
        self._space, self._fresh, self.thinking = "", True, False

    def start_call(self, name: str) -> None:
        self.in_call = True
        if not self._full:
            self._space = ""
            self._parts.append(CallStart(self.calls, self._new_id(), name))

    def arguments(self, text: str) -> None:
        if text and not self._full:
            self._add(CallArguments(self.calls, text))

    def end_call(self) -> None:
        self.in_call, self._fresh = False, True
        self.calls += not self._full

    def drop_space(self) -> None:
        """The waiting space stood before something that is no part of the answer."""
        self._space = ""

    def finish(self) -> None:
        """The reply is over: space at the end of an answer is part of it."""
        if self._space and not self.calls and not self._fresh:
            self._add(Content(self._space))
        self._space = ""

    @property
    def _full(self) -> bool:
        return self._most_calls is not None and self.calls >= self._most_calls

    def _add(self, part: Content | Reasoning | CallArguments) -> None:
        last = self._parts[-1] if self._parts else None
        match part, last:
            case Content(text), Content(before):
                self._parts[-1] = Content(before + text)
            case Reasoning(text), Reasoning(before):
                self._parts[-1] = Reasoning(before + text)
            case CallArguments(index, text), CallArguments(_, before):
                self._parts[-1] = CallArguments(index, before + text)
            case _:
                self._parts.append(part)


def until(source: Source, *marks: str, emit: Callable[[str], object]) -> Reading[str | None]:
    """Pass text to `emit` up to the first of `marks`, which is returned and left unread; None where the text ends
    first. No mark may lie inside another, other than at its end."""
    while True:
        found = [(place, mark) for mark in marks if (place := source.unread.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            emit(source.take(place))
            return mark
        held = 0 if source.ended else max((overlap(source.unread, mark) for mark in marks), default=0)
        if size := len(source.unread) - held:
            emit(source.take(size))
        if source.ended:
            return None
        yield


def ahead(source: Source, *marks: str) -> Reading[str | None]:
    """Which of `marks` comes next, past white space, which is taken; None where none of them does."""
    while True:
        source.take(len(source.unread) - len(source.unread.lstrip()))
        for mark in marks:
            if source.unread.startswith(mark):
                return mark
        possible = any(mark.startswith(source.unread) for mark in marks)
        if source.ended or not possible:
            return None
        yield


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
