"""How many tokens the next step may compute. Owns the device's observed speed; pure arithmetic, the clock is the
caller's."""

from __future__ import annotations

from dataclasses import dataclass

LEAST = 64
MOST = 2048
FIRST = 512


@dataclass
class StepBudget:
    """A fixed number of tokens, or as many as the device computes in `target_s` seconds.

    A prompt chunk holds up every running reply for as long as its step lasts, so what should be constant is that time
    and not the tokens: a laptop and a data-centre GPU differ a hundredfold. Long contexts make steps slower, which
    shrinks their chunks likewise. Powers of two between `least` and `ceiling`, so that few shapes occur.
    """

    fixed: int | None = None
    target_s: float = 0.25
    least: int = LEAST
    ceiling: int = MOST
    _tokens_per_s: float | None = None

    @property
    def most(self) -> int:
        """The largest budget of a step; where more rows than that decode, a step computes more."""
        return self.fixed or self.ceiling

    def tokens(self, replies_run: bool) -> int:
        """The budget of the next step: the full one when no reply waits for it."""
        if self.fixed is not None:
            return self.fixed
        if self._tokens_per_s is None:
            return min(FIRST, self.ceiling)
        seconds = self.target_s if replies_run else 2 * self.target_s
        wanted = max(1, int(self._tokens_per_s * seconds))
        return min(max(1 << (wanted.bit_length() - 1), self.least), self.ceiling)

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` took `seconds`. Small steps say nothing of speed: they are bound by fixed costs."""
        if tokens >= self.least and seconds > 0:
            rate = tokens / seconds
            self._tokens_per_s = rate if self._tokens_per_s is None else 0.7 * self._tokens_per_s + 0.3 * rate
