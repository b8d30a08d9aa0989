"""Where a person's words come from: a terminal, edited with prompt_toolkit, or a pipe, line by line. Owns keys,
history and what counts as one message; knows nothing of what is done with it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.application.current import set_app
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from .. import paths
from .slash import NAMES
from .typeahead import FINISHED, PASTE_S, TypeAhead

_QUOTES = '"""'
_KEEP = {"\n", "\t"}
_NO_KEYS = {Keys.CPRResponse, "?"}
"""What the line editor queues without a key press: the terminal's own answers and its mark for "flush"."""


class Keyboard(Protocol):
    """Gives one message after the other."""

    async def read(self, prefill: str = "") -> str | None:
        """The next message, begun with `prefill` where a person can change it; None at the end. Raises
        KeyboardInterrupt for Ctrl-C on an empty line."""
        ...

    async def shown(self) -> None:
        """Waits until the first prompt can be typed at."""
        ...

    def fail(self, error: BaseException) -> None:
        """Makes a `read` that is waiting raise `error`."""
        ...

    def above(self, say: Callable[[], None]) -> None:
        """Runs `say`, which prints, above a prompt that is waiting; does nothing when none is."""
        ...

    def close(self) -> None:
        """Lets go of what is read from."""
        ...


def is_open(text: str) -> bool:
    """Whether a message goes on in the next line: a trailing backslash, or triple quotes that are not closed."""
    return text.endswith("\\") or (text.lstrip().startswith(_QUOTES) and text.count(_QUOTES) % 2 == 1)


def unwrapped(text: str) -> str:
    """The message itself, without enclosing triple quotes and without control characters."""
    text = text.strip()
    if text.startswith(_QUOTES) and text.endswith(_QUOTES) and len(text) >= 2 * len(_QUOTES):
        text = text[len(_QUOTES) : -len(_QUOTES)].strip("\n")
    return "".join(char for char in text if char in _KEEP or (char >= " " and char != "\x7f"))


class PipeKeyboard:
    """A message per line of a pipe or file; the rules for longer messages are the terminal's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    async def read(self, prefill: str = "") -> str | None:
        text = ""
        await asyncio.sleep(0)  # whatever is ready to run does: the load begins
        # Read on this thread, not on another: Ctrl-C can end this, and nothing else waits for the loop meanwhile.
        while line := self._stream.readline():
            text += line.rstrip("\r\n")
            if not is_open(text):
                return unwrapped(text)
            text = text.removesuffix("\\") + "\n"
        return unwrapped(text) if text.strip() else None

    async def shown(self) -> None:
        """Nobody looks at a pipe's prompt."""

    def fail(self, error: BaseException) -> None:
        """A pipe never waits for a person: the error is met when the next message is sent."""

    def above(self, say: Callable[[], None]) -> None:
        """A pipe has no prompt: what there is to say is said with the next message."""

    def close(self) -> None:
        """Whoever opened the pipe closes it."""


class TerminalKeyboard:
    """A line editor with history; lines finished between two prompts are the next messages. `status` is asked for the
    line shown below the prompt; empty: none is shown. `remembers`: what is typed is there in the next chat too."""

    def __init__(self, status: Callable[[], str], remembers: bool = True) -> None:
        self._status = status
        self._shown = asyncio.Event()
        self._session: PromptSession[str] = PromptSession(
            message=[("bold", ">>> ")],
            prompt_continuation="... ",
            multiline=True,
            history=_history() if remembers else InMemoryHistory(),
            key_bindings=_bindings(),
            completer=WordCompleter(list(NAMES), sentence=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            placeholder=[("fg:ansibrightblack", "Say something (/help for commands)")],
            bottom_toolbar=lambda: self._status() or None,
            refresh_interval=0.2,
            tempfile_suffix=".md",
            output=create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
        )
        self._session.app.after_render += lambda _: self._shown.set()
        self._ahead = TypeAhead(self._session.app.input)

    async def read(self, prefill: str = "") -> str | None:
        self._ahead.end()
        try:
            return unwrapped(await self._session.prompt_async(default=prefill))
        except EOFError:
            return None
        finally:
            self._ahead.begin()

    async def shown(self) -> None:
        await self._shown.wait()

    def fail(self, error: BaseException) -> None:
        if self._session.app.is_running:
            self._session.app.exit(exception=error)

    def above(self, say: Callable[[], None]) -> None:
        if self._session.app.is_running:
            with set_app(self._session.app):
                run_in_terminal(say)

    def close(self) -> None:
        self._ahead.close()


def _history() -> History:
    """The file of earlier messages, for this person only; in memory where it cannot be written."""
    file = paths.state_dir() / "chat-history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))


def _bindings(clock: Callable[[], float] = time.monotonic) -> KeyBindings:
    keys = KeyBindings()
    pasting_until = 0.0

    @keys.add(Keys.Enter)
    def send(event: KeyPressEvent) -> None:
        """Sends, unless the message is open or a paste without its brackets brings this line break: more keys came
        with it, or a moment ago came one with more."""
        nonlocal pasting_until
        buffer = event.current_buffer
        typed_ahead = event.data == FINISHED.data
        more = _more_keys(event)
        if not typed_ahead and (more or clock() < pasting_until):
            pasting_until = clock() + PASTE_S if more else 0.0
            buffer.insert_text("\n")
        elif is_open(buffer.text) and buffer.document.is_cursor_at_the_end:
            if buffer.text.endswith("\\"):
                buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add(Keys.Escape, Keys.Enter)
    @keys.add(Keys.ControlJ)
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add(Keys.ControlC)
    def drop(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    @keys.add(Keys.ControlG)
    def edit(event: KeyPressEvent) -> None:
        event.current_buffer.open_in_editor()

    return keys


def _more_keys(event: KeyPressEvent) -> bool:
    return any(press.key not in _NO_KEYS for press in event.key_processor.input_queue)
