"""What a reply consists of while it arrives: thinking, prose and code blocks. Owns the line rules that tell them
apart; formats nothing and knows no widget.

Every code block becomes a piece of its own, wherever it stands, so that prose is parsed as Markdown in small parts and
a long block costs nothing until it is closed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thinking:
    """More of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Prose:
    """More Markdown, without code blocks."""

    text: str


@dataclass(frozen=True, slots=True)
class CodeStart:
    """A code block begins; `language` is what its fence says, or empty."""

    language: str


@dataclass(frozen=True, slots=True)
class Code:
    """More text of the open code block."""

    text: str


@dataclass(frozen=True, slots=True)
class CodeEnd:
    """The open code block is complete."""


Piece = Thinking | Prose | CodeStart | Code | CodeEnd

_FENCE = re.compile(r"^(?P<indent> {0,12})(?P<marker>`{3,}|~{3,})(?P<info>[^`\n]*)$")
_MAY_BE_FENCE = re.compile(r"^ {0,12}(`{1,2}|`{3,}[^`\n]*|~{1,2}|~{3,}[^\n]*)?$")
_THINK, _THINK_END = "<think>", "</think>"


class PieceReader:
    """Takes a reply as it comes and gives its pieces. A line that may still turn out to be a fence is held back until
    its end, or until `finish`."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = True  # of thinking or prose: False while only the empty lines before it have come
        self._line_start = True
        self._state = "start"  # then "thinking", "prose" or "code"
        self._marker = ""
        self._indent = 0

    def feed(self, text: str) -> Iterator[Piece]:
        """The pieces that are certain now; neighbours of one kind come as one."""
        yield from _joined(self._read(text, final=False))

    def finish(self) -> Iterator[Piece]:
        """What was held back, and the end of a block the reply left open."""
        yield from _joined(self._read("", final=True))
        if self._state == "code":
            self._state = "prose"
            yield CodeEnd()

    def _read(self, text: str, final: bool) -> Iterator[Piece]:
        self._held += text
        before = None
        while self._held and before != (self._held, self._state):
            before = (self._held, self._state)
            if not self._begun:
                self._held = self._held.lstrip("\n")
                self._begun = bool(self._held)
            match self._state:
                case "start":
                    self._begin(final)
                case "thinking":
                    yield from self._think(final)
                case _:
                    yield from self._read_line(final)

    def _begin(self, final: bool) -> None:
        """A reply may open with thinking; blank space before it does not count."""
        bare = self._held.lstrip()
        if bare.startswith(_THINK):
            self._held, self._state, self._begun = bare.removeprefix(_THINK), "thinking", False
        elif final or (bare and not _THINK.startswith(bare)):
            self._state, self._begun = "prose", False

    def _think(self, final: bool) -> Iterator[Piece]:
        thought, end, rest = self._held.partition(_THINK_END)
        if end:
            self._held, self._state, self._begun = rest, "prose", False
        elif final:
            self._held = ""
        else:  # the end marker may come in parts
            kept = next((n for n in range(len(_THINK_END) - 1, 0, -1) if thought.endswith(_THINK_END[:n])), 0)
            thought, self._held = thought[: len(thought) - kept], thought[len(thought) - kept :]
        if thought:
            yield Thinking(thought)

    def _read_line(self, final: bool) -> Iterator[Piece]:
        """One line, or as much of an unfinished one as is certain."""
        line, newline, rest = self._held.partition("\n")
        if not newline and self._line_start and not final and self._may_be_marker(line):
            return
        self._held = rest
        if self._line_start and (newline or final):
            if self._state == "code" and self._closes(line):
                self._state, self._line_start = "prose", True
                yield CodeEnd()
                return
            if self._state == "prose" and (fence := _FENCE.match(line)):
                self._state, self._marker, self._indent = "code", fence["marker"], len(fence["indent"])
                self._line_start = True
                info = fence["info"].split()
                yield CodeStart(info[0] if info else "")
                return
        if self._state == "code" and self._line_start:
            line = line[min(self._indent, len(line) - len(line.lstrip(" "))) :]
        self._line_start = bool(newline)
        yield (Code if self._state == "code" else Prose)(line + newline)

    def _may_be_marker(self, line: str) -> bool:
        if self._state == "prose":
            return bool(_MAY_BE_FENCE.match(line))
        bare = line.strip(" ")
        return not bare or set(bare) == {self._marker[0]}

    def _closes(self, line: str) -> bool:
        bare = line.strip()
        return len(bare) >= len(self._marker) and set(bare) == {self._marker[0]}


def _joined(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Neighbouring texts of one kind as one piece."""
    held: Thinking | Prose | Code | None = None
    for piece in pieces:
        if held is not None and type(piece) is type(held):
            held = type(held)(held.text + piece.text)
            continue
        if held is not None:
            yield held
        held = piece if isinstance(piece, Thinking | Prose | Code) else None
        if held is None:
            yield piece
    if held is not None:
        yield held
