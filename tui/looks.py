"""The engine's figures while somebody wants to see them. Owns when they are asked for; shows none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from textual.screen import Screen
from textual.timer import Timer

from ..engine.events import EngineStats
from ..errors import MlxpagedError
from .connection import Engine
from .details import Rates

LOOK_S, IDLE_LOOK_S, AWAY_LOOK_S = 1.0, 3.0, 10.0
"""Time between two looks at the engine: while it computes, while it does not, while the terminal is elsewhere."""


@dataclass(frozen=True, slots=True)
class Interest:
    """What decides whether and how often to look: is it shown, what is there to ask, does it answer one of us."""

    shown: Callable[[], bool]
    engine: Callable[[], Engine | None]
    busy: Callable[[], bool]


class Looks:
    """Looks at the engine from time to time; `draw` is called when one brought something new."""

    def __init__(self, screen: Screen[None], interest: Interest, draw: Callable[[], None]) -> None:
        self.stats: EngineStats | None = None
        self.rates = Rates()
        self.away = False
        """Whether the terminal is in the background."""
        self._screen, self._interest, self._draw = screen, interest, draw
        self._timer: Timer | None = None

    @property
    def idle(self) -> bool:
        """Whether no look is due."""
        return self._timer is None

    def soon(self) -> None:
        """Begins to look, if it is not so already and somebody wants to see."""
        if self._timer is None and self._interest.shown():
            self._timer = self._screen.set_timer(0.01, self._look_in_background)

    def _look_in_background(self) -> None:
        self._screen.run_worker(self._look(), group="look")

    async def _look(self) -> None:
        """One look at the engine's figures, and the time of the next one."""
        engine, before = self._interest.engine(), self.stats
        if engine:
            try:
                self.stats = await engine.backend.stats()
                self.rates.look(time.monotonic(), self.stats.generated_tokens)
            except MlxpagedError:
                self.stats = None
        busy = bool(self.stats and self.stats.rows) or self._interest.busy()
        quiet = self.stats and before and not busy and self.stats.steps == before.steps and not any(self.rates.values)
        if not quiet:
            self._draw()
        self._timer = None
        if engine and self._interest.shown():
            pause = AWAY_LOOK_S if self.away else LOOK_S if busy else IDLE_LOOK_S
            self._timer = self._screen.set_timer(pause, self._look_in_background)
