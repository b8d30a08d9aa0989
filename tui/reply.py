"""A reply on the screen while it arrives and afterwards. Owns the widgets of its pieces; decides nothing about when to
draw."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import TypeVar

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Markdown, Static
from textual.widgets._markdown import MarkdownParagraph

from ..chat.foreign import neutralise
from .code_block import CodeBlock
from .messages import CopyText
from .pieces import Code, CodeEnd, CodeStart, PieceReader, Prose, Thinking
from .steady import needs_layout

_SEPARATORS = dict.fromkeys((0x2028, 0x2029), "\n")
"""Characters that some readers take for line ends and others do not."""

W = TypeVar("W", bound=Widget)


@cache
def _parser() -> MarkdownIt:
    """HTML is text here: a reply about <div> must show it. A line break is one, as models mean it in verse. Made once:
    putting its rules together takes longer than reading a paragraph, and it is asked for at every drawing."""
    parser = MarkdownIt("gfm-like", {"html": False})
    parser.core.ruler.push("line_breaks", _keep_line_breaks)
    return parser


def _keep_line_breaks(state: StateCore) -> None:
    for child in (child for token in state.tokens for child in token.children or ()):
        if child.type == "softbreak":
            child.type = "hardbreak"


class Paragraph(MarkdownParagraph):
    """One that grows, and has the screen laid out anew only where it needs another line."""

    def set_content(self, content: Content) -> None:
        before, self._content = self._content, content
        self.update(content, layout=needs_layout(self, before, content))


class Passage(Markdown):
    """Prose of a reply."""

    BLOCKS = {**Markdown.BLOCKS, "paragraph_open": Paragraph}  # noqa: RUF012 - the base class declares it so

    def __init__(self) -> None:
        super().__init__(parser_factory=_parser, open_links=False)

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """An address from a model is never opened, only handed over."""
        event.stop()
        self.post_message(CopyText(event.href, event.href))


class Thought(Vertical):
    """The model's thinking: one line that opens."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        self._head = Static("", classes="thought-head", markup=False)
        self._body = Static("", classes="thought-body", markup=False)
        self._body.display = False

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._body

    def on_mount(self) -> None:
        self._draw()

    @property
    def is_open(self) -> bool:
        """Whether the text is shown."""
        return self._body.display

    def on_click(self) -> None:
        self.toggle()

    def write(self, text: str) -> None:
        """More of it."""
        self._text += text
        self._draw()

    def toggle(self, shown: bool | None = None) -> None:
        """Opens or closes it."""
        self._body.display = not self._body.display if shown is None else shown
        self._draw()

    def _draw(self) -> None:
        words = len(self._text.split())
        self._head.update(f"{'▾' if self._body.display else '▸'} thinking · {words} words")
        if self._body.display:
            self._body.update(self._text.strip())


class ReplyBody(Vertical):
    """Everything a reply says, growing at its end."""

    def __init__(self) -> None:
        super().__init__()
        self._reader = PieceReader()
        self._taken = 0
        self._finished = False
        self._code: CodeBlock | None = None
        self._passage: Passage | None = None
        self._thought: Thought | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def is_finished(self) -> bool:
        """Whether no more text is taken."""
        return self._finished

    @property
    def code_blocks(self) -> list[CodeBlock]:
        """The code blocks, in order."""
        return list(self.query(CodeBlock))

    async def show(self, text: str, final: bool) -> None:
        """Brings the widgets up to `text`, the whole reply so far. What is not certain yet (half a fence) waits for
        more, or for `final`."""
        async with self._one_at_a_time:
            if self._finished:
                return
            new, self._taken = text[self._taken :], len(text)
            pieces = list(self._reader.feed(neutralise(new).translate(_SEPARATORS)))
            if final:
                pieces += self._reader.finish()
                self._finished = True
            for piece in pieces:
                await self._add(piece)

    async def _add(self, piece: Thinking | Prose | CodeStart | Code | CodeEnd) -> None:
        match piece:
            case Thinking(text):
                self._thought = self._thought or await self._mounted(Thought())
                self._thought.write(text)
            case Prose(text):
                if self._passage is None and not text.strip():
                    return
                self._passage = self._passage or await self._mounted(Passage())
                await self._passage.append(text)
            case CodeStart(language):
                self._passage = None
                self._code = await self._mounted(CodeBlock(language))
            case Code(text) if self._code:
                self._code.write(text)
            case CodeEnd() if self._code:
                block, self._code = self._code, None
                await block.close()

    async def _mounted(self, widget: W) -> W:
        await self.mount(widget)
        return widget
