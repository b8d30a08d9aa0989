"""What is typed while no prompt is open: it is read at once, since a terminal that holds 4 kB unread no longer tells of
Ctrl-C, and kept for the next prompt. Owns which of its line breaks finish a line; runs none of the lines."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise

from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

from .terminal import silent_keyboard, tell_terminal

PASTE_S = 0.05
"""Nobody types the next line's end this soon after a line break that came with more keys."""

FINISHED = KeyPress(Keys.Enter, "finished")
"""Enter that ends a line typed ahead, whatever keys come after it."""

_LINE_BREAK = KeyPress(Keys.ControlJ, "\n")
_ALONE_S = 0.5
"""An escape is a key of its own when nothing follows it for so long; as in the line editor."""


class TypeAhead:
    """Reads `terminal` between `begin` and `end`. The keys are the line editor's from then on, as if typed then: each
    prompt takes them up to the Enter that finishes its line. A paste finishes none."""

    def __init__(self, terminal: Input, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = terminal
        self._clock = clock
        self._presses: list[tuple[KeyPress, float]] = []
        self._at = -math.inf
        self._reading = ExitStack()
        self._silence = ExitStack()
        self._silent = False

    def begin(self) -> None:
        """A prompt has ended. What is typed is not shown from the first time on, so that a prompt that comes finds
        nothing on its line."""
        if not self._silent:
            self._silence.enter_context(silent_keyboard())
            self._silent = True
        tell_terminal("\x1b[?2004h")  # the line editor took its brackets around pastes with it
        self._reading.enter_context(self._terminal.attach(self._read))
        self._at = self._clock()
        self._keep(get_typeahead(self._terminal))  # lines that wait still, and what came while the prompt was put away

    def end(self) -> None:
        """A prompt begins."""
        self._reading.close()
        self._lone_escape()
        store_typeahead(self._terminal, keys_of(self._presses))
        self._presses = []

    def close(self) -> None:
        """No prompt comes any more: the terminal is as it was."""
        self._reading.close()
        self._silence.close()

    def _read(self) -> None:
        self._lone_escape()
        self._at = self._clock()
        self._keep(self._terminal.read_keys())

    def _lone_escape(self) -> None:
        if self._clock() - self._at > _ALONE_S:
            self._keep(self._terminal.flush_keys())

    def _keep(self, keys: list[KeyPress]) -> None:
        for key in keys:
            if key.key == Keys.ControlC:  # pressed before the terminal made a signal of it again
                signal.raise_signal(signal.SIGINT)
            elif key.key != Keys.CPRResponse:
                self._presses.append((key, self._at))


def keys_of(presses: list[tuple[KeyPress, float]]) -> list[KeyPress]:
    """The keys that `presses`, each with its time in seconds, stand for at a prompt: an Enter finishes its line, unless
    a paste without brackets brought it. Escapes with nothing behind them were meant for the reply and are left out."""
    keys: list[KeyPress] = []
    pasting_until, escaped = -math.inf, False
    for (press, at), (_, next_at) in pairwise([*presses, (_LINE_BREAK, math.inf)]):
        if press.key == Keys.Escape and next_at - at > _ALONE_S:
            continue
        if press.key == Keys.Enter and press != FINISHED and not escaped:
            more = next_at - at < PASTE_S
            keys.append(_LINE_BREAK if more or at < pasting_until else FINISHED)
            pasting_until = at + PASTE_S if more else -math.inf
        else:
            keys.append(press)
        escaped = press.key == Keys.Escape
    return keys
