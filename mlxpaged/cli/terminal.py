"""What may touch the terminal directly. Owns the redrawn region at the bottom of the scrollback and the silent keyboard
between prompts. Knows nothing of models or conversations."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


def is_plain(stream: TextIO, environ: dict[str, str]) -> bool:
    """Whether `stream` gets plain text: it is no terminal, or NO_COLOR or TERM=dumb asks for it."""
    return not stream.isatty() or bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"


_BEGIN_UPDATE, _END_UPDATE = "\x1b[?2026h", "\x1b[?2026l"
_TRAILING_BLANKS = re.compile(r" +((?:\x1b\[0m)*)$")


class LiveRegion:
    """The last lines of the output, redrawn as they change, then left in the scrollback.

    A redraw rewrites only the lines from the first changed one on, in one write inside a synchronised update, so
    that nothing flickers. A region taller than the screen shows its end until it is committed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: list[str] = []
        self._cut = False

    def draw(self, lines: list[str], height: int) -> None:
        """Shows `lines` (each narrower than the screen) in place of what the region showed; `height` in rows."""
        room = max(1, height - 1)
        self._replace(lines[-room:], cut=len(lines) > room)

    def commit(self, lines: list[str]) -> None:
        """Leaves `lines` in the scrollback for good; the region is empty and below them afterwards."""
        if lines or self._shown:
            self._replace(lines, cut=False, ending="\r\n" if lines else "")
        self._shown, self._cut = [], False

    def _replace(self, lines: list[str], cut: bool, ending: str = "") -> None:
        lines = [_TRAILING_BLANKS.sub(r"\1", line) for line in lines]
        if lines != self._shown:
            same = 0 if self._cut or cut else _common_length(lines[:-1], self._shown)
            changed = self._move_to(same) + "\x1b[K\r\n".join(lines[same:])
            self._stream.write(f"{_BEGIN_UPDATE}{changed}\x1b[J{ending}{_END_UPDATE}")
            self._stream.flush()
        elif ending:
            self._stream.write(ending)
            self._stream.flush()
        self._shown, self._cut = lines, cut

    def _move_to(self, index: int) -> str:
        """From the end of the last shown line to the start of line `index`, which may be the one below it."""
        if not self._shown:
            return ""
        if index == len(self._shown):
            return "\r\n"
        up = len(self._shown) - 1 - index
        return "\r" + (f"\x1b[{up}A" if up else "")


def _common_length(first: list[str], second: list[str]) -> int:
    """How many lines the two have in common from the top."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def copy_to_clipboard(text: str) -> None:
    """Hands `text` to the terminal's clipboard (OSC 52), which also works over ssh; nothing without a terminal."""
    if sys.stdout.isatty():
        sys.stdout.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07")
        sys.stdout.flush()


@contextmanager
def silent_keyboard() -> Iterator[None]:
    """Keys pressed inside are not echoed over the reply and arrive as they were pressed, Enter as Enter. Ctrl-C still
    interrupts. Does nothing where the keyboard is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    silent = termios.tcgetattr(keyboard)
    silent[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
    silent[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
    silent[3] |= termios.NOFLSH  # Ctrl-C must not swallow what was typed before it
    termios.tcsetattr(keyboard, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)
        tell_terminal("\x1b[?2004l")


def tell_terminal(sequence: str) -> None:
    """Writes a control sequence of ours to whichever output is the terminal."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            stream.write(sequence)
            stream.flush()
            return
