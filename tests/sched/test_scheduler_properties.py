"""Random lives of many requests on a small pool, with the invariants checked after every step.

A fake device stands in for the model: KV slot contents are (prefix identity) numbers, so that a block shared wrongly
is seen as a wrong number, not only as a wrong count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxpaged.errors import MlxpagedError
from mlxpaged.sched.allocator import GroupSpec
from mlxpaged.sched.events import EndEvent, TokenEvent
from mlxpaged.sched.requests import FinishReason, Request, SamplingParams, StepPlan, StepResult
from mlxpaged.sched.scheduler import Scheduler
from mlxpaged.sched.table import BLOCK_SIZE, RequestTable

VOCAB = 5  # few ids, so that random prompts share prefixes
END = 4


class FakeDevice:
    """Keeps, per group and slot, the hash of all tokens up to there. A decode entry reads its whole context (its
    window) back and samples from it; anything wrong in a slot it reads is an error at once."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slots = [np.zeros(pool.num_blocks * BLOCK_SIZE, np.int64) for pool in scheduler.blocks.pools]
        self.last = np.zeros(scheduler.table.num_rows, np.int64)
        self.ids: dict[int, dict[int, int]] = {}  # row -> position -> id, as the device knows them
        self.epoch = np.full(scheduler.table.num_rows, -1)

    def run(self, plan: StepPlan) -> StepResult:
        table = self.scheduler.table
        for copy in plan.copies:
            source, target = copy.source * BLOCK_SIZE, copy.destination * BLOCK_SIZE
            pool = self.slots[copy.group]
            pool[target : target + copy.slots] = pool[source : source + copy.slots]
        writes = [
            (chunk.row, position)
            for chunk in plan.chunks
            for position in range(chunk.start, chunk.start + chunk.length)
        ]
        entries = list(zip(plan.decode_rows.tolist(), plan.decode_positions.tolist(), strict=True))
        reads = []
        for row, position in [*writes, *entries]:
            ids = self._ids(row, position)
            for group, slots in enumerate(self.slots):
                block = table.block_ids[group][row, position // BLOCK_SIZE]
                assert block != 0, "a token is written to the null block"
                slots[block * BLOCK_SIZE + position % BLOCK_SIZE] = _identity(ids, position)
            reads.append((row, position, ids))
        for row, position, ids in reads:
            for group, spec in enumerate(self.scheduler.blocks.groups):
                low = 0 if spec.window is None else max(0, position - spec.window + 1)
                for read in range(low, position + 1):
                    block = table.block_ids[group][row, read // BLOCK_SIZE]
                    found = self.slots[group][block * BLOCK_SIZE + read % BLOCK_SIZE]
                    assert found == _identity(ids, read), f"row {row} reads wrong KV at {read} in group {group}"
        sampled = [_sample(self._ids(row, position)) for row, position in entries]
        for (row, position), token in zip(entries, sampled, strict=True):
            self.ids.setdefault(row, {})[position + 1] = token
        return StepResult(np.asarray(sampled, np.int32))

    def resize(self, num_blocks: Sequence[int]) -> None:
        """What new slots hold is nobody's identity."""
        for group, count in enumerate(num_blocks):
            slots = np.zeros(count * BLOCK_SIZE, np.int64)
            kept = min(len(slots), len(self.slots[group]))
            slots[:kept] = self.slots[group][:kept]
            self.slots[group] = slots

    def _ids(self, row: int, position: int) -> list[int]:
        table = self.scheduler.table
        if self.epoch[row] != table.epoch[row]:
            self.epoch[row], self.ids[row] = table.epoch[row], {}
        known = table.token_ids[row, : min(table.length[row], position + 1)].tolist()
        return known + [self.ids[row][place] for place in range(len(known), position + 1)]


def _identity(ids: list[int], position: int) -> int:
    return hash(tuple(ids[: position + 1]))


def _sample(ids: list[int]) -> int:
    return (sum(ids) * 7 + len(ids) * 3) % VOCAB


def reference(prompt: list[int], sampling: SamplingParams, limit: int) -> list[int]:
    """What a request must give, run alone."""
    ids = list(prompt)
    while len(ids) < limit:
        token = _sample(ids)
        ids.append(token)
        if token == END and not sampling.ignore_eos:
            break
    return ids[len(prompt) :]


class Rig:
    """A scheduler, a fake device and `ahead` steps in flight."""

    def __init__(self, groups: list[GroupSpec], *, rows: int, budget: int, ahead: int, context: int = 160) -> None:
        self.scheduler = Scheduler(RequestTable(rows, context, len(groups)), groups, step_budget=budget)
        self.device = FakeDevice(self.scheduler)
        self.ahead = ahead
        self.flights: list[tuple[StepPlan, StepResult]] = []
        self.replies: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.errors: dict[int, str | None] = {}

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.flights.append((plan, self.device.run(plan)))
        growth = self.scheduler.blocks.growth()
        self.commit(self.ahead if plan is not None and growth is None else 0)
        if growth is not None:
            self.device.resize(growth)
            self.scheduler.blocks.grown(growth)
        self.take_events()
        self.scheduler.check()
        return plan is not None

    def take_events(self) -> None:
        for event in self.scheduler.take_events():
            match event:
                case TokenEvent(request_id, token, _, finish):
                    assert request_id not in self.ends, "a token after the end"
                    self.replies.setdefault(request_id, []).append(token)
                    if finish:
                        self.ends[request_id] = finish
                case EndEvent(request_id, finish, error):
                    self.ends[request_id], self.errors[request_id] = finish, error

    def commit(self, left: int) -> None:
        while len(self.flights) > left:
            self.scheduler.commit(*self.flights.pop(0))
            self.scheduler.check()

    def shrink(self) -> None:
        self.commit(0)
        self.take_events()
        self.device.resize(self.scheduler.blocks.shrink())
        self.scheduler.check()

    def drain(self) -> None:
        for _ in range(20_000):
            if self.scheduler.idle and not self.flights:
                return
            self.step()
        raise AssertionError("requests never end")


GROUPS = {
    "full": [GroupSpec(14)],
    "window": [GroupSpec(14, window=20)],
    "both": [GroupSpec(14), GroupSpec(12, window=20)],
    "growing": [GroupSpec(3, most_blocks=14), GroupSpec(2, window=20, most_blocks=12)],
}

actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.lists(st.integers(0, 1), min_size=1, max_size=70),
            st.integers(1, 60),
            st.booleans(),
        ),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.tuples(st.just("preempt"), st.integers(0, 40)),
        st.tuples(st.just("fail")),
        st.tuples(st.just("shrink")),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", GROUPS)  # those that cannot grow do not shrink either
@pytest.mark.parametrize("ahead", [0, 1, 2])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=actions, budget=st.sampled_from([7, 16, 33]))
def test_random_lives_lose_no_block_and_every_reply_equals_a_solo_run(kind, ahead, script, budget) -> None:
    rig = Rig(GROUPS[kind], rows=4, budget=budget, ahead=ahead)
    asked: dict[int, Request] = {}
    excused: set[int] = set()
    for action in script:
        match action:
            case ("add", ids, new, ignore):
                request = Request(
                    len(asked),
                    np.asarray(ids, np.int32),
                    SamplingParams(max_tokens=new, ignore_eos=ignore),
                    frozenset({END}),
                )
                rig.scheduler.add(request)
                asked[request.request_id] = request
            case ("step", times):
                for _ in range(times):
                    rig.step()
            case ("cancel", which) if asked:
                request_id = which % len(asked)
                if rig.scheduler.cancel(request_id):
                    excused.add(request_id)
                rig.scheduler.check()
            case ("preempt", which) if asked:
                live = next((x for x in rig.scheduler.live() if x.request.request_id == which % len(asked)), None)
                if live is not None and live.row is not None and live.leaving is None:
                    rig.scheduler.preempt(live)
                    rig.scheduler.check()
            case ("fail",):
                touched = {
                    rig.scheduler.table.requests[row].request_id for plan, _ in rig.flights for row in plan.rows()
                }
                rig.flights.clear()
                rig.scheduler.fail_unfinished("injected")
                excused |= touched
                rig.scheduler.check()
            case ("shrink",):
                rig.shrink()
    rig.drain()
    for request_id, request in asked.items():
        limit = min(160, len(request.prompt) + (request.sampling.max_tokens or 0))
        expected = reference(request.prompt.tolist(), request.sampling, limit)
        reply = rig.replies.get(request_id, [])
        if request_id in excused:
            assert reply == expected[: len(reply)]
        else:
            assert reply == expected
            assert rig.ends[request_id] is (
                FinishReason.STOP if expected[-1] == END and not request.sampling.ignore_eos else FinishReason.LENGTH
            )
    for pool in rig.scheduler.blocks.pools:
        counts = pool.counts()
        assert counts["used"] == 0 and counts["cached"] + counts["free"] == pool.num_blocks - 1


def test_a_prompt_the_pool_can_never_hold_is_refused_with_numbers() -> None:
    rig = Rig([GroupSpec(4)], rows=2, budget=16, ahead=0)
    with pytest.raises(MlxpagedError, match=r"49 tokens.* the pool 48, .*--memory-budget"):
        rig.scheduler.add(Request(1, np.zeros(49, np.int32), SamplingParams()))
