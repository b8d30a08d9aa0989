"""How often a growing reply is drawn. Owns that one number; draws nothing and has no timer."""

from __future__ import annotations

DRAW_S, SLOWEST_S = 0.12, 0.5
"""Least and most time between two drawings of replies that grow."""

SHARE = 0.03
"""Part of one core that drawing may take: where the CPU also computes the reply, every drawing delays its tokens."""


class Pace:
    """Between `DRAW_S` and `SLOWEST_S`, by what drawings have cost of late."""

    def __init__(self) -> None:
        self._cost_s = 0.0

    def cost(self, cpu_s: float) -> None:
        """A drawing took `cpu_s` seconds of the processor. Costs are smoothed, for some drawings hold the lists too;
        what is rare (a session opened, a dialog in front) is not made up for."""
        self._cost_s += (min(cpu_s, SLOWEST_S * SHARE) - self._cost_s) / 4

    @property
    def pause_s(self) -> float:
        """From the beginning of one drawing to that of the next."""
        return min(max(DRAW_S, self._cost_s / SHARE), SLOWEST_S)
