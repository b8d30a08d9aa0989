"""Requests from add() to their end, and the rows they hold meanwhile. Owns both and the events that tell of them; the
only one that gives rows and blocks back. Plans nothing."""

from __future__ import annotations

import numpy as np

from ..errors import InvariantError
from .allocator import KVAllocator
from .events import EndEvent, Event
from .queue import Live, PromptQueue
from .requests import FinishReason, StepPlan
from .table import RequestTable


class Tenants:
    """`by_id`: every request not yet ended. `by_row`: whoever has a row; a request that ends or is sent back to the
    queue keeps its row until no step in flight touches it."""

    def __init__(self, table: RequestTable, blocks: KVAllocator, queue: PromptQueue) -> None:
        self.by_id: dict[int, Live] = {}
        self.by_row: dict[int, Live] = {}
        self.events: list[Event] = []
        self._table = table
        self._blocks = blocks
        self._queue = queue

    @property
    def newest(self) -> Live:
        """Who came last of those with a row."""
        return max(self.by_row.values(), key=lambda live: live.arrival)

    @property
    def some_leave(self) -> bool:
        """Whether rows and blocks come free once the steps in flight are committed."""
        return any(live.leaving for live in self.by_row.values())

    def left(self, live: Live) -> int:
        """Known ids of a request still to compute before the last one."""
        if live.row is None:
            return len(live.ids) - 1
        return int(self._table.total[live.row] - 1 - self._table.scheduled[live.row])

    def stays(self, row: int) -> bool:
        """Whether the row is held, and by one who still needs it."""
        live = self.by_row.get(row)
        return live is not None and live.leaving is None

    def end(self, live: Live, reason: FinishReason | None = None, error: str | None = None) -> None:
        """The request is over; its row follows. `reason` tells it by an event, unless it had ended before."""
        if self.by_id.pop(live.request.request_id, None) is not None:
            self._queue.worked(max(0, self.left(live)))  # nobody waits for this work any more
            if reason is not None:
                self.events.append(EndEvent(live.request.request_id, reason, error))
        if live.row is None:
            self._queue.waiting.remove(live)
        else:
            self._leave(live, "end")

    def requeue(self, live: Live) -> None:
        """Back to its place in the queue; its blocks stay findable until somebody takes them."""
        self._leave(live, "requeue")

    def _leave(self, live: Live, how: str) -> None:
        live.leaving = "end" if live.leaving == "end" else how
        if live.in_flight == 0:
            self.vacate(live)

    def vacate(self, live: Live, *, publish: bool = True) -> None:
        """Give row and blocks back. `publish`: whether the row's KV may be found by others."""
        table, row = self._table, live.row
        assert row is not None
        requeue = live.leaving == "requeue"
        live.ids = table.token_ids[row, : table.length[row]].copy()
        self._blocks.settle(row)
        self._blocks.release(row, publish=publish)
        table.free(row)
        del self.by_row[row]
        live.row, live.leaving = None, None
        if requeue:
            self._queue.put(live)

    def fail_steps(self, plans: list[StepPlan], error: str) -> None:
        """End the requests of `plans`, which will never be committed, or not to their end; nothing that they may have
        written is found."""
        for row in {row for plan in plans for row in plan.rows()}:
            live = self.by_row.get(row)
            if live is None:
                continue  # given back by the commit that failed
            live.in_flight = max(live.in_flight, 1)  # so that the row is kept until it is given back unpublished
            self.end(live, FinishReason.ERROR, error)
            live.in_flight = 0
            self.vacate(live, publish=False)

    def check(self, unfinished: list[StepPlan]) -> None:
        """Raise InvariantError unless table, queue and rows agree, `unfinished` being the plans in flight."""
        table = self._table
        if set(np.flatnonzero(table.active).tolist()) != set(self.by_row):
            raise InvariantError("the active rows of the table are not the scheduler's")
        flights = [row for plan in unfinished for row in plan.rows()]
        for row, live in self.by_row.items():
            marks = (table.computed[row], table.scheduled[row], table.total[row], table.limit[row])
            if list(marks) != sorted(marks):
                raise InvariantError(f"row {row}: computed, scheduled, total, limit are {marks}")
            if live.in_flight != flights.count(row):
                raise InvariantError(f"row {row} counts {live.in_flight} steps in flight, is in {flights.count(row)}")
        for live in self.by_id.values():
            if (live.row is None) != (live in self._queue.waiting):
                raise InvariantError(f"request {live.request.request_id} neither waits nor runs, or both")
