"""What runs in the next step, and what a finished step changes. Owns the plans in flight; with its parts (prompts.py,
commits.py, tenants.py) the only writer of the state table. Knows nothing of mlx, text or clocks.

    plan = scheduler.schedule()        # None: nothing to do, or everything waits for a step in flight
    scheduler.commit(plan, result)     # in launch order, also when later plans are already in flight
    events = scheduler.take_events()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import InvariantError, Overloaded, PromptTooLong
from .allocator import GroupSpec, KVAllocator
from .commits import Commits
from .events import Event
from .prompts import PromptPlanner
from .queue import Live, PromptQueue
from .requests import BlockCopy, Chunk, FinishReason, Request, StepPlan, StepResult
from .table import BLOCK_SIZE, RequestTable
from .tenants import Tenants

log = logging.getLogger(__name__)


class Scheduler:
    """Plans mixed steps: every row that can decode, then prompt chunks in what that leaves of `step_budget` tokens, a
    block of them at least. `score_budget`: prompt tokens a step whose logits may be asked for.

    A row's last known id is always a decode entry; it joins the step of the row's final chunk. The same rule covers
    a full prefix hit, a one-token prompt and a resumed reply.
    """

    def __init__(
        self,
        table: RequestTable,
        groups: Sequence[GroupSpec],
        *,
        step_budget: int,
        max_queue: int = 512,
        score_budget: int = 64,
        share: bool = True,
    ) -> None:
        self.table = table
        self.blocks = KVAllocator(table, groups, share=share)
        self.queue = PromptQueue(step_budget)
        self.step_budget = step_budget
        self.max_queue = max_queue
        self.steps = self.preemptions = 0
        self._tenants = Tenants(table, self.blocks, self.queue)
        self._prompts = PromptPlanner(
            table, self.blocks, self.queue, self._tenants, step_budget=step_budget, score_budget=score_budget
        )
        self._commits = Commits(table, self.blocks, self._tenants)
        self._unfinished: list[StepPlan] = []
        self._arrivals = 0

    # -- from outside ------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not self._tenants.by_id and not self._unfinished

    @property
    def has_events(self) -> bool:
        """Whether something happened that take_events() has not told yet."""
        return bool(self._tenants.events)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts admitted so far."""
        return self._prompts.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Those of them whose KV was found."""
        return self._prompts.cached_tokens

    @property
    def generated_tokens(self) -> int:
        """Ids of all replies so far."""
        return self._commits.generated_tokens

    @property
    def max_prompt(self) -> int:
        """The longest prompt that context and pool admit, with one token of reply."""
        return min(self.table.context_len, self.blocks.most_tokens()) - 1

    def live(self) -> list[Live]:
        """Every request not yet ended, in no particular order."""
        return list(self._tenants.by_id.values())

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLong when it could never run, Overloaded when the queue is full."""
        length = len(request.prompt)
        if length > self.max_prompt:
            context, pool = self.table.context_len, self.blocks.most_tokens()
            hint = ", or raise --memory-budget" if pool < context else ""
            raise PromptTooLong(
                f"prompt has {length} tokens; the context holds {context} and the pool {pool}, reply included; "
                f"shorten the prompt{hint}",
                param="messages",
            )
        if len(self.queue.waiting) >= self.max_queue + self.table.num_free_rows:
            raise Overloaded(f"{len(self.queue.waiting)} requests are waiting already; try again, or raise --max-queue")
        self._arrivals += 1
        due = self.queue.due(length - 1)  # the last id is a decode entry's
        live = Live(request, self._arrivals, due, np.asarray(request.prompt, np.int32))
        self._tenants.by_id[request.request_id] = live
        self.queue.put(live)

    def cancel(self, request_id: int) -> bool:
        """End a request in whatever state it is, without an event; False when it had ended already. Its blocks are
        given back at once, or by the commit of the last step in flight that touches them."""
        live = self._tenants.by_id.get(request_id)
        if live is None:
            return False
        self._tenants.end(live)
        return True

    def fail(self, row: int, error: str) -> None:
        """End the request in `row` alone, with `error`."""
        self._tenants.end(self._tenants.by_row[row], FinishReason.ERROR, error)

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        events, self._tenants.events = self._tenants.events, []
        return events

    # -- plan --------------------------------------------------------------------------------------------------

    def schedule(self, budget: Callable[[bool], int] | None = None) -> StepPlan | None:
        """The next step; None when no row can move before a step in flight is committed, or nothing is left.
        `budget`, asked whether replies run, gives the step's tokens, at most `step_budget`."""
        decode = self._decode_rows()
        tokens = self.step_budget if budget is None else min(self.step_budget, budget(bool(decode)))
        prompts = self._prompts.plan(max(tokens - len(decode), BLOCK_SIZE))
        decode += prompts.joined
        if not decode and not prompts.chunks:
            return self._unstick(budget)
        return self._launch(decode, prompts.chunks, prompts.copies)

    def _decode_rows(self) -> list[int]:
        """Rows with one known id left to compute, and a block for it; the newest give way when there is no room."""
        table = self.table
        total = table.total
        ready = np.flatnonzero(table.active & (table.scheduled == total - 1) & (total < table.limit))
        ready = ready[np.argsort(table.arrival[ready], kind="stable")]
        short = (table.num_blocks[:, ready] * BLOCK_SIZE <= table.scheduled[ready]).any(axis=0)
        stays = self._tenants.stays
        stuck = {row for row in ready[short].tolist() if stays(row) and not self._find_room(row)}
        return [row for row in ready.tolist() if stays(row) and row not in stuck]

    def _find_room(self, row: int) -> bool:
        """A block for the row's next position, from the newest row if need be. False: the row cannot go now."""
        tenants, end = self._tenants, int(self.table.scheduled[row]) + 1
        live = tenants.by_row[row]
        while not self.blocks.extend(row, end):
            if self.blocks.growth() is not None:
                return False  # room is coming, once the steps in flight are committed
            if tenants.some_leave:
                return False  # room is coming, once the step in flight is committed
            newest = tenants.newest
            if len(tenants.by_row) == 1:
                if self.blocks.held_back:  # the last row may grow all the same: else its reply would end here
                    self.blocks.allow_growth(True)
                    continue
                self._starve(live)
                return False
            self.preempt(newest)
            if newest is live or newest.row is not None:
                return False
        return True

    def preempt(self, live: Live) -> None:
        """Take a running request's row and blocks; it goes on, from what is still found, when there is room."""
        self.preemptions += 1
        self._tenants.requeue(live)

    def _starve(self, live: Live) -> None:
        """The last row left finds no block: its reply ends here."""
        if live.in_flight:
            return
        log.warning(
            "request %d ends after %d tokens: the KV pool is full; raise --memory-budget",
            live.request.request_id,
            live.generated,
        )
        if live.generated:
            self._tenants.end(live, FinishReason.LENGTH)
        else:
            told = "the KV pool has no room for the whole prompt; shorten it, or raise --memory-budget"
            self._tenants.end(live, FinishReason.ERROR, told)

    def _unstick(self, budget: Callable[[bool], int] | None) -> StepPlan | None:
        """Nothing could be planned. With no step in flight and no growth to come that means prompts hold the pool
        between them: the newest gives way so that the oldest can finish."""
        if self._unfinished or not self._tenants.by_row or self.blocks.growth() is not None:
            return None
        newest = self._tenants.newest
        if len(self._tenants.by_row) > 1:
            self.preempt(newest)
        elif self.blocks.held_back:
            self.blocks.allow_growth(True)
        else:
            self._starve(newest)
        return self.schedule(budget)

    def _launch(self, decode: list[int], chunks: tuple[Chunk, ...], copies: tuple[BlockCopy, ...]) -> StepPlan:
        table = self.table
        rows = np.asarray(decode, np.int32)
        rows = rows[np.argsort(-table.scheduled[rows], kind="stable")]  # longest first: see StepPlan
        plan = StepPlan(
            step=self.steps,
            decode_rows=rows,
            decode_positions=table.scheduled[rows],
            from_device=table.pending[rows] > 0,
            chunks=chunks,
            copies=copies,
        )
        table.scheduled[rows] += 1
        table.pending[rows] += 1
        for row in plan.rows():
            self._tenants.by_row[row].in_flight += 1
        self.steps += 1
        self._unfinished.append(plan)
        return plan

    # -- commit ------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take in a finished step: ids, ends, blocks to publish and to give back. Plans are committed in order."""
        if not self._unfinished or self._unfinished[0] is not plan:
            raise InvariantError(f"step {plan.step} is committed out of order")
        self._commits.take(plan, result)
        self.blocks.end_copies(plan.copies)
        self._unfinished.pop(0)  # last: until here a fault leaves the plan to fail_unfinished()

    def fail_unfinished(self, error: str) -> None:
        """A step failed on the device: end the requests of every step not yet committed, and let nothing be found
        that those steps may have written."""
        plans, self._unfinished = self._unfinished, []
        for plan in plans:
            self.blocks.end_copies(plan.copies)
        self._tenants.fail_steps(plans, error)

    def fail_all(self, error: str) -> None:
        """The pool's contents are lost: end every running request and let nothing be found any more."""
        for row in list(self._tenants.by_row):
            self.fail(row, error)
        self.blocks.forget()

    def check(self) -> None:
        """Raise InvariantError unless table, queue, pools and rows agree."""
        self.blocks.check([copy for plan in self._unfinished for copy in plan.copies])
        self._tenants.check(self._unfinished)
