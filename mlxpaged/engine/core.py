"""The loop over one model: schedule, launch, wait, commit. Synchronous, token ids only; owns the steps in flight. Knows
nothing of threads, text or clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..model.runner import PendingStep, Runner
from ..sched.requests import Request, StepPlan
from ..sched.scheduler import Event, Scheduler

Deliver = Callable[[list[Event]], None]


class EngineCore:
    """One scheduler and one runner. `ahead` steps are launched before the last one's ids are read: 0 on the CPU."""

    def __init__(self, scheduler: Scheduler, runner: Runner, ahead: int = 0) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.ahead = ahead
        self._flights: deque[tuple[StepPlan, PendingStep]] = deque()

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def add(self, request: Request) -> None:
        """Queue a request; raises PromptTooLong or Overloaded."""
        self.scheduler.add(request)

    def cancel(self, request_id: int) -> bool:
        """End a request without an event; False when it had ended."""
        return self.scheduler.cancel(request_id)

    def step(self, deliver: Deliver) -> None:
        """One turn: launch the next step, hand out the last one's events while the device works, commit what is due."""
        plan = self.scheduler.schedule()
        if plan is not None:
            pending = self.runner.launch(plan, self.scheduler.table, self._commit_all)
            self._flights.append((plan, pending))
            for row, error in pending.failed.items():
                self.scheduler.fail(row, error)
        deliver(self.scheduler.take_events())
        while len(self._flights) > (self.ahead if plan is not None else 0):
            self._commit_oldest()
        if self.scheduler.idle:
            deliver(self.scheduler.take_events())

    def _commit_oldest(self) -> None:
        plan, pending = self._flights.popleft()
        self.scheduler.commit(plan, pending.wait())

    def _commit_all(self) -> None:
        while self._flights:
            self._commit_oldest()

    def fail(self, error: str, deliver: Deliver) -> None:
        """A step raised: end the requests of the unfinished steps, drop what they touched, and be ready to go on."""
        self._flights.clear()
        self.scheduler.fail_unfinished(error)
        if not self.runner.recover():
            self.scheduler.fail_all(error)
        deliver(self.scheduler.take_events())
