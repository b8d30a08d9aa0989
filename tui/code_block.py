"""A code block of a reply. Owns its lines and how they are coloured; knows nothing of fences or replies.

While a short block arrives it is coloured at every update; a long one stays plain until it is complete and is then
coloured once. Only the rows on the screen are ever rendered, so thousands of lines cost as much as a few.
"""

from __future__ import annotations

import asyncio

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.geometry import Size
from textual.highlight import ANSIDarkHighlightTheme, ANSILightHighlightTheme, HighlightTheme, highlight
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.visual import Style
from textual.widgets import Static

from .highlighting import CodeColours
from .messages import CopyText

COLOURED_WHILE_OPEN = 150
"""Lines up to which an open block is coloured at every update: a few milliseconds each time."""

COLOURED_AT_ALL = 20_000
"""Lines beyond which a block stays plain: colouring it would stop the screen for seconds."""

TAB = 4


class CodeBlock(Vertical):
    """A frame with the language, a way to copy the text, and the lines."""

    def __init__(self, language: str) -> None:
        super().__init__()
        self._language = language
        self._source = ""
        self._lines = CodeLines(language)

    def compose(self) -> ComposeResult:
        with Horizontal(classes="code-head"):
            yield Static(self._language or "text", classes="code-language", markup=False)
            yield CopyButton("copy")
        yield self._lines

    @property
    def source(self) -> str:
        """The text of the block as the model wrote it."""
        return self._source.removesuffix("\n")

    def write(self, text: str) -> None:
        """More of the block."""
        self._source += text
        self._lines.write(text)

    async def close(self) -> None:
        """The block is complete: it gets its colours for good."""
        await self._lines.close()

    def on_copy_button_pressed(self, event: CopyButton.Pressed) -> None:
        event.stop()
        self.post_message(CopyText(self.source, "The code block"))


class CopyButton(Static):
    """A word to click."""

    ALLOW_SELECT = False

    class Pressed(events.Message):
        """It was clicked."""

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.post_message(self.Pressed())


class CodeLines(ScrollView, can_focus=False):
    """Lines that are never wrapped; wide ones scroll sideways."""

    def __init__(self, language: str) -> None:
        super().__init__()
        self._language = language
        self._plain: list[str] = []
        self._coloured: list[Content] = []
        self._widest = 0
        self._complete = False

    def write(self, text: str) -> None:
        """Appends text; a line may come in parts."""
        text = text.expandtabs(TAB) if "\t" in text else text
        first, *rest = text.split("\n")
        if self._plain:
            self._plain[-1] += first
        else:
            self._plain = [first]
        changed = len(self._plain) - 1
        self._plain += rest
        self._widest = max(self._widest, *(cell_len(line) for line in self._plain[changed:]))
        if len(self._plain) <= COLOURED_WHILE_OPEN:
            self._coloured = self._in_colour()
        else:
            del self._coloured[changed:]  # this line has grown since it was coloured
        self._resize()

    async def close(self) -> None:
        """Colours all lines once; a long block in a thread, so that keys are still answered."""
        self._complete = True
        if self._plain and not self._plain[-1]:
            self._plain.pop()
        if len(self._plain) <= COLOURED_WHILE_OPEN:
            self._coloured = self._in_colour()
        elif len(self._plain) <= COLOURED_AT_ALL:
            self._coloured = await asyncio.to_thread(self._in_colour)
        self._resize()

    def notify_style_update(self) -> None:
        """A theme of terminal colours needs other names for them."""
        super().notify_style_update()
        if self._coloured:
            self._coloured = self._in_colour()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return selection.extract("\n".join(self._plain)), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def render_line(self, y: int) -> Strip:
        x, top = self.scroll_offset
        row = top + y
        style = self.visual_style
        width = self.size.width
        if row >= len(self._plain):
            return Strip.blank(width, style.rich_style)
        line = self._coloured[row] if row < len(self._coloured) else Content(self._plain[row])
        if (selection := self.text_selection) is not None and (span := selection.get_span(row)) is not None:
            start, end = span
            chosen = Style.from_styles(self.screen.get_component_styles("screen--selection"))
            line = line.stylize(chosen, start, len(line) if end == -1 else end)
        strip = Strip(line.render_segments(style), line.cell_length)
        return strip.crop_extend(x, x + width, style.rich_style).apply_offsets(x, row)

    def _in_colour(self) -> list[Content]:
        theme: type[HighlightTheme] = CodeColours
        if self.app.native_ansi_color:
            theme = ANSIDarkHighlightTheme if self.app.current_theme.dark else ANSILightHighlightTheme
        text = highlight("\n".join(self._plain), language=self._language or "text", theme=theme)
        coloured = [span for span in text.spans if span.style != "$text"]  # the block's own colour shows through
        return Content(text.plain, coloured).split("\n", allow_blank=True)

    def _resize(self) -> None:
        shown = len(self._plain) - (not self._complete and self._plain[-1:] == [""])
        self.virtual_size = Size(self._widest, max(shown, 1))
        self.refresh(layout=True)
