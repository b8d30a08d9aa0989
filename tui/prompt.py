"""Where the person writes. Owns the text being written, what was pasted into it and what was sent before; sends
nothing itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea

from ..chat.foreign import neutralise
from .commands import matching
from .keymap import Keys
from .keys import bound
from .messages import Send

CHIP_LINES, CHIP_CHARS = 20, 4096
"""A paste longer than this is shown as a chip."""

_CHIP = re.compile(r"\[pasted #(\d+): [\d,]+ lines?\]")


_OWN = ("send", "new_line", "close_session", "leave_empty")
"""Actions that depend on what is written: their keys wait for those typed before them, as no priority binding does."""

_EDITS = {one.key: one.action for one in Binding.make_bindings(TextArea.BINDINGS)}
"""Textual's keys that edit. Left to bindings they would work only after signs, and an Enter, that were typed later but
arrived with them."""


class Prompt(TextArea):
    """A text that grows to ten lines, then scrolls. Enter sends; a paste never does."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bound("send", "send", "send"),
        bound("new_line", "new_line"),
    ]

    @dataclass
    class Grew(Message):
        """The text changed; `text` is what it is now, chips not opened."""

        text: str

    def __init__(self, keys: Keys) -> None:
        super().__init__(placeholder="Ask anything", soft_wrap=True, show_line_numbers=False, compact=True)
        self.cursor_blink = False  # a blinking cursor would redraw an idle screen twice a second
        self.highlight_cursor_line = False
        self._actions = {key: name for name in _OWN for key in keys.by_action[name]}
        self._pasted: list[str] = []
        self._sent: list[str] = []
        self._recalled: int | None = None

    @property
    def written(self) -> str:
        """The text with every chip opened."""
        return _CHIP.sub(lambda chip: self._content_of(chip), self.text)

    def put(self, text: str) -> None:
        """Replaces the text; the cursor goes to its end."""
        self.load_text(text)
        self.move_cursor(self.document.end)

    def give_back(self, text: str) -> None:
        """Puts a text that was not taken back in front of what was written since."""
        self.put(f"{text}\n{self.text}" if self.text else text)

    def remember(self, texts: list[str]) -> None:
        """What Up brings back, the newest last."""
        self._sent, self._recalled = texts, None

    def open_chips(self) -> None:
        """Shows what was pasted as text."""
        if _CHIP.search(self.text):
            self.put(self.written)

    def insert_pasted(self, text: str) -> None:
        """Puts pasted text at the cursor, as a chip when it is long."""
        text = neutralise(text.replace("\r\n", "\n").replace("\r", "\n"))
        lines = text.count("\n") + 1
        if lines > CHIP_LINES or len(text) > CHIP_CHARS:
            self._pasted.append(text)
            text = f"[pasted #{len(self._pasted)}: {lines:,} line{'s' * (lines > 1)}]"
        if result := self._replace_via_keyboard(text, *self.selection):
            self.move_cursor(result.end_location)

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        self.insert_pasted(event.text)

    async def _on_key(self, event: events.Key) -> None:
        match self._actions.get(event.key, event.key):
            case "send":
                self.action_send()
            case "new_line":
                self.action_new_line()
            case "close_session" | "leave_empty" as leave:
                self._leave_or_edit(leave, event.key)
            case "tab" if found := matching(self.text):
                self.put(f"/{found[0].name} ")
            case "backspace" if self._delete_chip():
                pass
            case "up" if self._recall(-1):
                pass
            case "down" if self._recalled is not None and self._recall(+1):
                pass
            case key if key in _EDITS:
                self._recalled = None
                await self.run_action(_EDITS[key])
            case _:
                self._recalled = None
                return  # the text area's own handler follows
        event.stop()
        event.prevent_default()

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        event.stop()
        self.post_message(self.Grew(self.text))

    def action_send(self) -> None:
        """Sends, or starts a new line behind a backslash."""
        row, column = self.cursor_location
        if self.document.get_line(row)[:column].endswith("\\"):
            self.replace("\n", (row, column - 1), (row, column))
        elif self.text.strip():
            text = self.written
            self.put("")  # at once: the next key may already be waiting
            self.post_message(Send(text))

    def action_new_line(self) -> None:
        """Starts a new line, whatever Enter does."""
        self.insert("\n")

    def _leave_or_edit(self, leave: str, key: str) -> None:
        """What is written is never left behind; Ctrl+W and Ctrl+D then edit it, as in a shell."""
        if not self.text:
            self.post_message(Send("/close" if leave == "close_session" else "/bye"))
        elif key == "ctrl+w":
            self.action_delete_word_left()
        elif key == "ctrl+d":
            self.action_delete_right()

    def _delete_chip(self) -> bool:
        """Backspace behind a chip takes all of it."""
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column]
        chip = next((one for one in _CHIP.finditer(before) if one.end() == column), None)
        if chip is None or self.selected_text:
            return False
        self.delete((row, chip.start()), (row, column))
        return True

    def _recall(self, step: int) -> bool:
        """Up in an empty prompt brings back what was sent, Down goes the other way."""
        if self._recalled is None and (self.text or step > 0):
            return False
        if self._recalled is not None and self.text != self._sent[self._recalled]:
            return False
        index = (len(self._sent) if self._recalled is None else self._recalled) + step
        if not 0 <= index <= len(self._sent):
            return index < 0
        self._recalled = index if index < len(self._sent) else None
        self.put(self._sent[index] if index < len(self._sent) else "")
        return True

    def _content_of(self, chip: re.Match[str]) -> str:
        number = int(chip[1])
        return self._pasted[number - 1] if 1 <= number <= len(self._pasted) else chip[0]
