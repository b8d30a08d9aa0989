"""When the screen is drawn. Owns what there is to draw and the one timer for it; draws nothing itself.

Nothing runs while nothing happens: the tracker says what changed, and the timer has it drawn. The reply on the screen
is drawn at most eight times a second and less often where drawing is slow; what the panes count, twice a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from textual.screen import Screen
from textual.timer import Timer

from .changes import Change
from .pace import Pace

COUNT_S = 0.5
"""Least time between two drawings of figures that only count on: rates, tokens."""


class Draw(Protocol):
    """Draws what changed, by session id; `counts` says whether it is time for figures that only count on."""

    def __call__(self, dirty: Mapping[str, Change], counts: bool) -> Awaitable[None]: ...


class Frames:
    """The drawings of `screen`, one at a time. `chosen` gives the session that is on it."""

    def __init__(self, screen: Screen[None], chosen: Callable[[], str], draw: Draw) -> None:
        self._screen, self._chosen, self._draw_all = screen, chosen, draw
        self._dirty: dict[str, Change] = {}
        self._timer: Timer | None = None
        self._drawing = False
        self._pace = Pace()
        self._due = self._next_draw = self._next_count = 0.0

    @property
    def idle(self) -> bool:
        """Whether everything that changed is on the screen."""
        return not (self._dirty or self._drawing or self._timer)

    def changed(self, session_id: str, change: Change) -> None:
        """There is something to draw; cheap, and called for every token."""
        self._dirty[session_id] = self._dirty.get(session_id, Change(0)) | change
        if not self._drawing and self._screen.is_mounted:
            only_counts = change == Change.TEXT and session_id != self._chosen()
            self._draw_at(self._next_count if only_counts else self._next_draw)

    async def settled(self) -> None:
        """Until everything that changed is on the screen; for tests and screenshots."""
        while not self.idle:
            await asyncio.sleep(0.01)

    def _draw_at(self, due: float) -> None:
        if self._timer:
            if due >= self._due:
                return
            self._timer.stop()
        self._due = due
        self._timer = self._screen.set_timer(max(due - time.monotonic(), 0.001), self._draw_in_background)

    def _draw_in_background(self) -> None:
        """In a worker: keys are answered while widgets are mounted."""
        self._timer, self._drawing = None, True
        self._screen.run_worker(self._draw(), group="draw")

    async def _draw(self) -> None:
        began, began_cpu = time.monotonic(), time.thread_time()
        dirty, self._dirty = self._dirty, {}
        counts = began >= self._next_count or any(change != Change.TEXT for change in dirty.values())
        if counts:
            self._next_count = began + COUNT_S
        try:
            await self._draw_all(dirty, counts)
        finally:
            self._drawing = False
            now = time.monotonic()
            self._next_draw = max(began + self._pace.pause_s, now + 4 * (now - began))  # keys come in between
            self._screen.call_after_refresh(lambda: self._pace.cost(time.thread_time() - began_cpu))
            for session_id, change in list(self._dirty.items()):
                self.changed(session_id, change)
