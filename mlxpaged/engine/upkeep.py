"""What the engine does for the machine's memory between steps and while nothing is asked: gives back what MLX keeps for
reuse after a quiet while, and what the pool only caches when the system wants memory. Owns when; the core does it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..model.memory import pressed, release_memory
from .core import EngineCore

log = logging.getLogger(__name__)

QUIET_S = 10.0
"""After so long without work MLX's caches are given back: the next request makes them anew."""
LOOK_S = 2.0
IDLE_LOOK_S = 15.0
"""How often memory pressure is looked for; while idle only as long as there is something to give."""


class Upkeep:
    """Called once a turn of the engine's loop. `pressed` tells whether the system wants memory back."""

    def __init__(
        self,
        pressed: Callable[[], bool] = pressed,
        release: Callable[[], None] = release_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pressed = pressed
        self._release = release
        self._clock = clock
        self._worked_at = self._look_at = clock()
        self._released = False
        self._under_pressure = False
        self._shrunk_at = -1  # how many steps had been launched then

    def turn(self, core: EngineCore | None, working: bool) -> None:
        """Do what is due. No step is lost by it: shrinking commits those in flight first."""
        now = self._clock()
        if working:
            self._worked_at, self._released = now, False
        elif not self._released and now - self._worked_at >= QUIET_S:
            self._release()
            self._released = True
        if core is not None and now >= self._look_at and (working or core.shrinkable):
            self._look(core)
            self._look_at = self._clock() + (LOOK_S if working else IDLE_LOOK_S)

    def wait_s(self, core: EngineCore | None) -> float | None:
        """While idle: seconds until something is due; None when nothing is, however long it lasts."""
        now, due = self._clock(), []
        if not self._released:
            due.append(self._worked_at + QUIET_S - now)
        if core is not None and core.shrinkable:
            due.append(self._look_at - now)
        return max(0.0, min(due)) if due else None

    def _look(self, core: EngineCore) -> None:
        before, self._under_pressure = self._under_pressure, self._pressed()
        core.scheduler.blocks.allow_growth(not self._under_pressure)
        # A pool that grew again for a step that could not go without must serve it before it shrinks once more.
        if self._under_pressure and core.shrinkable and core.scheduler.steps != self._shrunk_at:
            held = core.runner.kv_bytes
            core.shrink()
            self._shrunk_at = core.scheduler.steps
            self._release()
            given = (held - core.runner.kv_bytes) / 2**20
            if given or not before:
                log.info("the system wants memory: %.0f MiB of cached K/V were given back", given)
