"""What Ctrl-C does in a chat while no prompt is open. Owns the handler of SIGINT for as long as the chat lasts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupts:
    """Ctrl-C between prompts (inside one the line editor takes it as a key).

    `call` is what it does now. One that comes before there is anything to stop stops the next thing. Set as a plain
    signal handler, which the line editor puts back when it is done; a handler of the loop it would remove.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._call: Callable[[], object] | None = None
        self._early = False
        self._before = signal.signal(signal.SIGINT, lambda *_: self._loop.call_soon_threadsafe(self._interrupt))

    def forget(self) -> None:
        """A new prompt begins: what was pressed before it no longer counts."""
        self._early = False

    @contextmanager
    def doing(self, call: Callable[[], object]) -> Iterator[None]:
        """Inside, Ctrl-C does `call`."""
        self._call = call
        if self._early:
            self._interrupt()
        try:
            yield
        finally:
            self._call = None

    def end(self) -> None:
        """Ctrl-C is what it was before."""
        signal.signal(signal.SIGINT, self._before)

    def _interrupt(self) -> None:
        self._early = self._call is None
        if self._call:
            self._call()
