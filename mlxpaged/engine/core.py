"""The loop over one model: schedule, launch, wait, commit. Synchronous, token ids only; owns the steps in flight. Knows
nothing of threads or text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from ..model.runner import PendingStep, Runner
from ..sched.budget import StepBudget
from ..sched.events import Event
from ..sched.requests import Request, StepPlan
from ..sched.scheduler import Scheduler

Deliver = Callable[[list[Event]], None]
Resize = Callable[[Sequence[int]], Sequence[int]]
"""Blocks per KV group that the pool should hold -> those that it holds then. Called with no step in flight."""


class EngineCore:
    """One scheduler and one runner. `ahead` steps are launched before the last one's ids are read: 0 on the CPU.
    `resize` changes the pool's size; None: it stays as it is."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        ahead: int = 0,
        budget: StepBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
        resize: Resize | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.ahead = ahead
        self.budget = budget or StepBudget(scheduler.step_budget)
        self._clock = clock
        self._resize = resize
        self._done_at = 0.0
        self._flights: deque[tuple[StepPlan, PendingStep, float]] = deque()

    @property
    def idle(self) -> bool:
        """Nothing is left to do, and nothing to tell."""
        return self.scheduler.idle and not self.scheduler.has_events

    def add(self, request: Request) -> None:
        """Queue a request; raises PromptTooLong or Overloaded."""
        self.scheduler.add(request)

    def cancel(self, request_id: int) -> bool:
        """End a request without an event; False when it had ended."""
        return self.scheduler.cancel(request_id)

    def step(self, deliver: Deliver) -> None:
        """One turn: launch the next step, hand out the last one's events while the device works, commit what is due."""
        plan = self.scheduler.schedule(self.budget.tokens)
        if plan is not None:
            launched = self._clock()
            pending = self.runner.launch(plan, self.scheduler.table, self._commit_all)
            self._flights.append((plan, pending, launched))
            for row, error in pending.failed.items():
                self.scheduler.fail(row, error)
        deliver(self.scheduler.take_events())
        growth = self.scheduler.blocks.growth()
        while len(self._flights) > (self.ahead if plan is not None and growth is None else 0):
            self._commit_oldest()
        if growth is not None:
            self._grow(growth)
        if self.scheduler.idle:
            deliver(self.scheduler.take_events())

    def _grow(self, num_blocks: Sequence[int]) -> None:
        blocks = self.scheduler.blocks
        now = [pool.num_blocks for pool in blocks.pools]
        blocks.grown(self._resize(num_blocks) if self._resize else now)

    @property
    def shrinkable(self) -> bool:
        """Whether the pool has grown beyond what it began with."""
        return self._resize is not None and self.scheduler.blocks.has_grown

    def shrink(self) -> None:
        """Memory is wanted elsewhere: give up what the pool only caches, before anything else."""
        self._commit_all()
        if self._resize is not None:
            self._resize(self.scheduler.blocks.shrink())

    def _commit_oldest(self) -> None:
        plan, pending, launched = self._flights.popleft()
        result = pending.wait()
        began, self._done_at = max(launched, self._done_at), self._clock()
        self.budget.observe(plan.num_tokens, self._done_at - began)
        self.scheduler.commit(plan, result)

    def _commit_all(self) -> None:
        while self._flights:
            self._commit_oldest()

    def fail(self, error: str, deliver: Deliver) -> None:
        """A step raised: end the requests of the unfinished steps, drop what they touched, and be ready to go on.
        Raises where the device has no room for a new pool."""
        self._flights.clear()
        self.scheduler.fail_unfinished(error)
        if not self.runner.recover():
            self.scheduler.fail_all(error)
        deliver(self.scheduler.take_events())
