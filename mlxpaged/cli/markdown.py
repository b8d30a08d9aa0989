"""Markdown as it streams in. Owns which blocks of a reply are finished; prints each once and redraws only the open
one. Knows nothing of conversations or engines."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, TextIO

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown
from rich.syntax import Syntax
from rich.text import Text

from ..chat.foreign import neutralise
from .terminal import LiveRegion

_PARSER = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
"""HTML is text here: a reply about <div> must show it, and rich drops what it takes for HTML."""

_CODE_CONTEXT = 60
"""Earlier lines of an open code block that a new line is highlighted after: the cost per line stays bounded."""

_CODE_THEME = "ansi_dark"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class _PlainHeading(Heading):
    """A heading on the left, underlined at the first two levels; rich's own is centred in a box."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        self.text.stylize("bold underline" if self.tag in {"h1", "h2"} else "bold")
        yield self.text


class _ReplyMarkdown(Markdown):
    """rich's Markdown with plain headings, no HTML, line breaks kept (models write verses and addresses), and the
    address of a link shown rather than hidden in it."""

    elements: ClassVar = {**Markdown.elements, "heading_open": _PlainHeading}

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme=_CODE_THEME, inline_code_theme=_CODE_THEME, hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for child in (child for token in self.parsed for child in token.children or ()):
            if child.type == "softbreak":
                child.type = "hardbreak"


@dataclass
class _Fence:
    """An open code block: its marker, its indentation and the last lines printed."""

    marker: str
    info: str
    indent: int
    context: list[str] = field(default_factory=list)

    def closes(self, line: str) -> bool:
        bare = line.strip()
        return len(bare) >= len(self.marker) and set(bare) == {self.marker[0]} and len(line) - len(line.lstrip()) < 4

    def body(self, line: str) -> str:
        """The line without the indentation that the opening fence had."""
        lead = len(line) - len(line.lstrip(" "))
        return line[min(lead, self.indent) :]


class MarkdownStream:
    """One reply printed to a terminal while it arrives: `feed` pieces, `refresh` now and then, `finish`.

    A top-level block is finished once another one follows it; finished blocks go to the scrollback, formatted. A
    code block at top level goes there line by line, between its fences, so that it can be copied as it stands.
    """

    def __init__(self, stream: TextIO = sys.stdout, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=False)
        self._region = LiveRegion(stream)
        self._clock = clock
        self._pending = ""
        self._fence: _Fence | None = None
        self._printed = False  # whether a block stands above, which the next one leaves a blank line to
        self._undrawn = False
        self._next_draw = 0.0

    def feed(self, text: str) -> None:
        """Takes the next piece; draws at once unless the last drawing was a moment ago: then `refresh` will."""
        self._pending += neutralise(text)
        self._undrawn = True
        self.refresh()

    def refresh(self) -> None:
        """Draws what was fed and not drawn yet, once the last drawing is old enough. To be called now and then."""
        started = self._clock()
        if not self._undrawn or started < self._next_draw:
            return
        self._undrawn = False
        self._advance()
        if self._pending.strip():
            self._region.draw(self._open_lines(), self._console.height)
        now = self._clock()
        self._next_draw = now + max(0.03, 4 * (now - started))

    def status(self, text: str) -> None:
        """Shows one passing line (what the engine is doing) until the next piece arrives."""
        if not self._pending:
            self._region.draw([*self._gap(), self._styled(Text(text, "dim"))], self._console.height)

    def finish(self) -> None:
        """Prints what is left; the cursor is at the start of a fresh line afterwards."""
        self._advance()
        if self._pending.strip():
            self._commit(self._open_lines())
        else:
            self._region.commit([])
        self._pending, self._fence, self._printed, self._undrawn = "", None, False, False

    def _advance(self) -> None:
        """Prints every block and code line that no later text can change."""
        while True:
            before = (self._pending, self._fence)
            if self._fence:
                self._print_code_lines(self._fence)
            else:
                self._print_finished_blocks()
            if before == (self._pending, self._fence):
                return

    def _print_finished_blocks(self) -> None:
        blocks = [token for token in _PARSER.parse(self._pending) if token.level == 0 and token.map]
        if not blocks:
            return
        # Up to the first code block, or to the last block, which later text may still change.
        cut = next((block for block in blocks if block.type == "fence"), blocks[-1])
        lines = self._pending.split("\n")
        starts = [block.map[0] for block in blocks[: blocks.index(cut) + 1] if block.map]
        for start, end in itertools.pairwise(starts):  # one by one, as they would have come one by one
            self._commit(self._rendered("\n".join(lines[start:end]).rstrip("\n")))
        self._pending = "\n".join(lines[starts[-1] :])
        header, newline, rest = self._pending.partition("\n")
        if cut.type == "fence" and newline:
            self._fence = _Fence(cut.markup, cut.info.strip(), len(header) - len(header.lstrip(" ")))
            self._commit([*self._gap(), self._styled(Text(header.strip(), "dim"))])
            self._pending = rest

    def _print_code_lines(self, fence: _Fence) -> None:
        """Moves whole lines from the pending text to the scrollback; leaves the fence when its end is there."""
        while "\n" in self._pending:
            line, _, self._pending = self._pending.partition("\n")
            if fence.closes(line):
                self._close(fence)
                return
            self._commit(self._code(fence, line))
            fence.context = [*fence.context, fence.body(line)][-_CODE_CONTEXT:]

    def _close(self, fence: _Fence) -> None:
        self._fence = None
        self._commit([self._styled(Text(fence.marker, "dim"))])

    def _open_lines(self) -> list[str]:
        """The lines of what is still open: a partial code line, or the last block."""
        if not self._fence:
            return self._rendered(self._pending.rstrip("\n"))
        if self._fence.closes(self._pending):
            return [self._styled(Text(self._pending.strip(), "dim"))]
        return self._code(self._fence, self._pending)

    def _code(self, fence: _Fence, line: str) -> list[str]:
        language = fence.info.split()[0] if fence.info else "text"
        syntax = Syntax("", language, theme=_CODE_THEME, background_color="default")
        source = "\n".join([*fence.context, fence.body(line)])
        highlighted = syntax.highlight(source)
        highlighted.rstrip()
        rows = highlighted.split("\n", allow_blank=True)
        text = rows[-1] if fence.body(line).strip() and len(rows) > len(fence.context) else Text(fence.body(line))
        text.expand_tabs(4)
        return self._styled_lines(text)

    def _rendered(self, source: str) -> list[str]:
        with self._console.capture() as capture:
            self._console.print(_ReplyMarkdown(source), width=self._width())
        lines = capture.get().split("\n")
        shown = [index for index, line in enumerate(lines) if _ESCAPES.sub("", line).strip()]
        return self._gap() + (lines[shown[0] : shown[-1] + 1] if shown else [""])

    def _styled_lines(self, text: Text) -> list[str]:
        with self._console.capture() as capture:
            self._console.print(text, width=self._width(), overflow="fold", no_wrap=False)
        return capture.get().removesuffix("\n").split("\n")

    def _styled(self, text: Text) -> str:
        return self._styled_lines(text)[0]

    def _commit(self, lines: list[str]) -> None:
        self._region.commit(lines)
        self._printed = True

    def _gap(self) -> list[str]:
        return [""] if self._printed else []

    def _width(self) -> int:
        """One column short of the screen: a full line leaves the cursor in a place terminals disagree on."""
        return max(10, self._console.width - 1)
