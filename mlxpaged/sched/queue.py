"""In what order prompts are served. Owns the waiting requests and the clock of prompt work; knows nothing of blocks,
rows' contents or mlx."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .requests import Request

PATIENCE_BUDGETS = 8
"""A prompt is never overtaken by more than this many step budgets of later prompts' work."""


@dataclass(eq=False, slots=True)
class Live:
    """A request from add() to its end. `row` is None while it waits; `leaving` tells what becomes of a row that a
    step in flight still touches: "requeue" or "end"."""

    request: Request
    arrival: int
    due: int  # of the work clock: by then its prompt should be done
    ids: np.ndarray  # int32: prompt, and after a preemption the reply so far
    row: int | None = None
    generated: int = 0
    cached_tokens: int | None = None  # fixed at first admission
    scored: int = 0  # leading prompt ids whose logprobs were delivered, of those that were asked for
    in_flight: int = 0  # steps launched and not committed that touch the row
    leaving: str | None = None

    @property
    def salt(self) -> bytes:
        return self.request.salt

    @property
    def to_score(self) -> int | None:
        """How many alternatives of each prompt id are still wanted; None: no logprobs of the prompt (any more)."""
        return self.request.sampling.prompt_logprobs if self.scored < len(self.request.prompt) - 1 else None


@dataclass(eq=False)
class PromptQueue:
    """The waiting requests, and the order between them and the prompts already being computed.

    The prompt with the fewest tokens left goes first (that halves the median time to the first token against even
    shares). Each request also has a due time on the clock of prompt tokens computed: what arrival order would need,
    plus PATIENCE_BUDGETS budgets. One that could not make it any more goes before all others, in arrival order.
    """

    budget: int
    clock: int = 0
    waiting: list[Live] = field(default_factory=list)
    _owed: int = 0  # prompt tokens that earlier arrivals still have to compute, at most

    def due(self, tokens: int) -> int:
        """The due time of a prompt that arrives now and has `tokens` to compute."""
        self._owed = max(self._owed, self.clock) + tokens
        return self._owed + PATIENCE_BUDGETS * self.budget

    def put(self, live: Live) -> None:
        """Let a request wait, in arrival order (one that was preempted takes its old place)."""
        place = len(self.waiting)
        while place and self.waiting[place - 1].arrival > live.arrival:
            place -= 1
        self.waiting.insert(place, live)

    def places(self) -> dict[int, int]:
        """Request id -> how many of the waiting requests go before it, as things are: a shorter prompt that comes later
        may still pass it."""
        order = sorted(self.waiting, key=lambda live: self.rank(live, len(live.ids) - 1))
        return {live.request.request_id: place for place, live in enumerate(order)}

    def worked(self, tokens: int) -> None:
        """Move the clock by `tokens` of prompt work: done, found in the prefix tree, or no longer wanted."""
        self.clock += tokens

    def rank(self, live: Live, left: int) -> tuple[int, int, int]:
        """Sorts first what should be computed first; `left` is the number of tokens still to compute."""
        late = self.clock + left >= live.due
        return (0, live.arrival, 0) if late else (1, left, live.arrival)
