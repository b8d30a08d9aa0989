"""What the scheduler promises, one promise a test."""

from __future__ import annotations

import numpy as np
import pytest

from mlxpaged.errors import Overloaded, PromptTooLong
from mlxpaged.sched.allocator import GroupSpec
from mlxpaged.sched.events import PromptEvent, TokenEvent
from mlxpaged.sched.queue import PATIENCE_BUDGETS
from mlxpaged.sched.requests import FinishReason, Request, SamplingParams, StepResult
from mlxpaged.sched.scheduler import Scheduler
from mlxpaged.sched.table import RequestTable

from .test_scheduler_properties import Rig


def request(request_id: int, prompt: list[int] | int, new: int = 4) -> Request:
    ids = list(range(100 * request_id, 100 * request_id + prompt)) if isinstance(prompt, int) else prompt
    return Request(request_id, np.asarray(ids, np.int32), SamplingParams(max_tokens=new, ignore_eos=True))


def rig(blocks: int = 64, *, rows: int = 8, budget: int = 32, ahead: int = 0, context: int = 900) -> Rig:
    return Rig([GroupSpec(blocks)], rows=rows, budget=budget, ahead=ahead, context=context)


def used(r: Rig) -> int:
    return r.scheduler.blocks.pools[0].counts()["used"]


def test_a_step_holds_decode_rows_and_chunks_together() -> None:
    r = rig()
    r.scheduler.add(request(1, 3, new=20))
    r.step()
    r.scheduler.add(request(2, 100))
    plan = r.scheduler.schedule()
    assert plan is not None
    assert len(plan.decode_rows) == 1 and [chunk.length for chunk in plan.chunks] == [31]
    assert plan.num_tokens == 32


def test_the_last_prompt_token_joins_the_step_of_the_final_chunk() -> None:
    r = rig()
    r.scheduler.add(request(1, 20))
    plan = r.scheduler.schedule()
    assert plan is not None
    assert plan.chunks[0].length == 19 and plan.decode_positions.tolist() == [19]


def test_a_one_token_prompt_has_no_chunk() -> None:
    r = rig()
    r.scheduler.add(request(1, 1))
    plan = r.scheduler.schedule()
    assert plan is not None and plan.chunks == () and plan.decode_positions.tolist() == [0]


def test_a_prompt_that_can_never_run_is_told_to_grow_the_pool_only_where_that_helps() -> None:
    with pytest.raises(PromptTooLong, match=r"the context holds 40 .*; shorten the prompt$"):
        rig(context=40).scheduler.add(request(1, 40))
    with pytest.raises(PromptTooLong, match=r"the pool 48, .*; shorten the prompt, or raise --memory-budget$"):
        rig(blocks=4).scheduler.add(request(1, 48))


def test_the_prompt_with_the_fewest_tokens_left_goes_first() -> None:
    r = rig()
    r.scheduler.add(request(1, 300))
    r.scheduler.add(request(2, 40))
    plan = r.scheduler.schedule()
    assert plan is not None and plan.chunks[0].length == 32
    assert r.scheduler.table.prompt_len[plan.chunks[0].row] == 40


def test_those_that_wait_have_places_in_the_order_they_will_be_served_in() -> None:
    r = rig(rows=1)
    r.scheduler.add(request(1, 3, new=20))
    r.step()
    for request_id, length in ((2, 60), (3, 20), (4, 40)):
        r.scheduler.add(request(request_id, length))
    r.step()
    assert r.scheduler.queue.places() == {3: 0, 4: 1, 2: 2}
    r.scheduler.cancel(4)
    assert r.scheduler.queue.places() == {3: 0, 2: 1}


def test_a_long_prompt_waits_no_longer_than_its_turn_and_eight_budgets() -> None:
    r = rig(blocks=400, budget=32, rows=8)
    r.scheduler.add(request(1, 300, new=1))
    work, other = 0, 2
    while 1 not in r.ends:
        while len(r.scheduler.queue.waiting) < 3:  # short prompts keep coming
            r.scheduler.add(request(other, 30, new=1))
            other += 1
        before = r.scheduler.queue.clock
        r.step()
        work += r.scheduler.queue.clock - before
    assert work <= 300 + 8 * 32 + 2 * 32


def test_work_that_failed_is_owed_no_more() -> None:
    """A prompt's place against later ones counts what is still to be done, not what an ended request left undone."""
    r = rig(blocks=900, rows=2, context=12000)
    for index in range(3):
        r.scheduler.add(request(index, 9000))
        r.scheduler.schedule()
        r.scheduler.fail_unfinished("the device went away")
        r.scheduler.add(request(10 + index, 100))
        r.drain()
    r.scheduler.add(request(9, 300))
    (live,) = r.scheduler.live()
    assert live.due - r.scheduler.queue.clock == 299 + PATIENCE_BUDGETS * 32


def test_chats_on_one_system_prompt_hold_the_shared_blocks_once() -> None:
    r = rig(blocks=200)
    system = list(range(160))  # ten blocks
    r.scheduler.add(request(1, [*system, 900], new=200))
    for _ in range(8):
        r.step()
    for index in range(2, 7):
        r.scheduler.add(request(index, [*system, 900 + index], new=200))
    for _ in range(20):
        r.step()
    own = sum(
        int(r.scheduler.table.num_blocks[0, live.row]) - 10 for live in r.scheduler.live() if live.row is not None
    )
    assert len([live for live in r.scheduler.live() if live.row is not None]) == 6
    assert used(r) == 10 + own


def test_prompts_sent_together_compute_a_shared_prefix_once() -> None:
    r = rig(blocks=200, budget=64)
    shared = list(range(256))
    for index in range(1, 6):
        r.scheduler.add(request(index, [*shared, 1000 + index], new=2))
    r.drain()
    computed = r.scheduler.prompt_tokens - r.scheduler.cached_tokens
    assert r.scheduler.prompt_tokens == 5 * 257
    assert computed <= 256 + 5 * 17


def test_a_second_turn_recomputes_at_most_a_block_and_a_token() -> None:
    r = rig(blocks=200, budget=64)
    first = list(range(77))
    r.scheduler.add(request(1, first, new=30))
    r.drain()
    history = first + r.replies[1]
    r.scheduler.add(request(2, [*history, 7, 8, 9], new=2))
    r.drain()
    assert r.scheduler.cached_tokens >= len(history) - 17


def test_a_partly_matching_block_is_copied_and_shared_by_token() -> None:
    r = rig()
    r.scheduler.add(request(1, list(range(40)), new=1))
    r.drain()
    r.scheduler.add(request(2, [*range(37), 500, 501, 502], new=1))
    plan = r.scheduler.schedule()
    assert plan is not None
    assert [copy.slots for copy in plan.copies] == [5]  # 32 tokens in whole blocks, five more by copy
    assert plan.chunks[0].start == 37


def test_the_newest_row_gives_way_when_the_pool_is_full_and_later_resumes() -> None:
    r = rig(blocks=9, budget=64)  # 128 tokens
    r.scheduler.add(request(1, 48, new=40))
    r.scheduler.add(request(2, 48, new=40))
    r.drain()
    assert r.scheduler.preemptions >= 1
    assert len(r.replies[1]) == len(r.replies[2]) == 40


def test_a_lone_row_that_fills_the_pool_ends_with_length(caplog) -> None:
    r = rig(blocks=5, context=900)  # 64 tokens
    r.scheduler.add(request(1, 20, new=400))
    r.drain()
    assert r.ends[1] is FinishReason.LENGTH and len(r.replies[1]) == 64 - 20 + 1
    assert "--memory-budget" in caplog.text


def test_a_lone_prompt_that_finds_no_room_is_an_error_and_not_an_empty_reply() -> None:
    r = Rig([GroupSpec(6, most_blocks=40)], rows=8, budget=32, ahead=0, context=900)
    grown = r.scheduler.blocks.grown
    r.device.resize = lambda sizes: None  # the machine gives nothing
    r.scheduler.blocks.grown = lambda sizes: grown((6,))
    r.scheduler.add(request(1, 200))
    r.drain()
    assert r.ends[1] is FinishReason.ERROR and "--memory-budget" in (r.errors[1] or "") and 1 not in r.replies


def test_a_full_queue_is_overloaded_and_says_which_flag_helps() -> None:
    scheduler = Scheduler(RequestTable(1, 64), [GroupSpec(8)], step_budget=8, max_queue=2)
    for index in range(3):
        scheduler.add(request(index, 4))
    with pytest.raises(Overloaded, match="--max-queue"):
        scheduler.add(request(9, 4))


def test_a_row_is_never_scheduled_past_an_end_the_host_can_foresee() -> None:
    r = rig(ahead=2)
    r.scheduler.add(request(1, 5, new=3))
    r.drain()
    assert len(r.replies[1]) == 3
    assert r.scheduler.steps == 3  # chunk and first token, then two more; nothing launched beyond


def test_cancelling_gives_back_blocks_within_a_step_in_every_state() -> None:
    r = rig(ahead=1)
    for index in range(1, 4):
        r.scheduler.add(request(index, 100, new=50))
    r.scheduler.cancel(3)  # queued
    r.step()
    r.scheduler.cancel(2)  # in prefill or queued
    while not r.replies.get(1):
        r.step()
    r.scheduler.cancel(1)  # decoding, a step in flight
    r.step()
    r.step()
    assert used(r) == 0 and r.scheduler.idle


def test_equal_blocks_behind_different_prefixes_are_not_shared() -> None:
    r = rig()
    tail = list(range(500, 516))
    r.scheduler.add(request(1, [*([1] * 16), *tail, 3], new=1))
    r.drain()
    r.scheduler.add(request(2, [*([2] * 16), *tail, 3], new=1))
    r.drain()
    assert r.scheduler.cached_tokens == 0


def test_another_salt_finds_nothing() -> None:
    r = rig()
    r.scheduler.add(request(1, 40, new=1))
    r.drain()
    ids = np.arange(100, 140, dtype=np.int32)
    r.scheduler.add(Request(2, ids, SamplingParams(max_tokens=1), salt=b"adapter"))
    r.drain()
    assert r.scheduler.cached_tokens == 0


def test_a_preemption_with_a_step_in_flight_keeps_its_token() -> None:
    r = rig(ahead=1)
    r.scheduler.add(request(1, 5, new=10))
    for _ in range(4):
        r.step()
    live = r.scheduler.live()[0]
    r.scheduler.preempt(live)
    assert live.row is not None, "the row stays until the step in flight is committed"
    r.drain()
    assert len(r.replies[1]) == 10


@pytest.mark.parametrize("prompt", [[7], [7, 8, 9, 10]])
def test_a_prompt_that_is_found_whole_is_told_of_once_and_before_its_first_token(prompt: list[int]) -> None:
    r = rig()
    for request_id in (1, 2):
        r.scheduler.add(request(request_id, prompt))
        plan = r.scheduler.schedule()
        assert plan is not None
        r.scheduler.commit(plan, StepResult(np.array([5], np.int32)))
        events = r.scheduler.take_events()
        found = len(prompt) - 1 if request_id == 2 else 0
        told = [(e.computed, e.total, e.cached) for e in events if isinstance(e, PromptEvent)]
        assert told == [(len(prompt) if found == len(prompt) - 1 else len(prompt) - 1, len(prompt), found)]
        assert isinstance(events[-1], TokenEvent)
        r.scheduler.cancel(request_id)


def test_every_token_event_carries_the_cached_count() -> None:
    r = rig()
    r.scheduler.add(request(1, 40, new=1))
    r.drain()
    r.scheduler.add(request(2, list(range(100, 140)), new=1))
    plan = r.scheduler.schedule()
    assert plan is not None
    r.scheduler.commit(plan, r.device.run(plan))
    events = [event for event in r.scheduler.take_events() if isinstance(event, TokenEvent)]
    assert events[0].cached_tokens == 39


def test_a_prompt_waits_for_a_prefix_of_its_own_salt_only() -> None:
    """The second of two like prompts waits while the first computes what it lacks; a stranger's is no help."""
    r = rig(budget=250, rows=4)
    for request_id, salt in ((1, b""), (2, b""), (3, b"other")):
        like = request(request_id, list(range(100)))
        r.scheduler.add(Request(request_id, like.prompt, like.sampling, salt=salt))
    plan = r.scheduler.schedule()
    assert plan is not None
    running = {live.request.request_id for live in r.scheduler.live() if live.row is not None}
    assert running == {1, 3}


def test_nothing_is_found_beyond_the_ids_the_host_has_seen() -> None:
    """A cancelled row's last step computes the K and V of an id that never reaches the host: its block stays
    unfindable, whatever lies in the table there."""
    r = rig(ahead=1)
    r.scheduler.add(request(1, list(range(1, 15)), new=20))
    first = r.scheduler.schedule()
    second = r.scheduler.schedule()  # takes its input, the id at position 14, from the device
    third = r.scheduler.schedule()  # and this one the id at position 15, which fills the block
    assert first and second and third and third.decode_positions.tolist() == [15]
    r.scheduler.cancel(1)
    for plan in (first, second, third):
        r.scheduler.commit(plan, StepResult(np.full(len(plan.decode_rows), 77, np.int32)))
    r.scheduler.check()
    known = np.array([*range(1, 15), 0, 0, 5], np.int32)
    match = r.scheduler.blocks.match(known)
    assert match.num_tokens == 14
    r.scheduler.blocks.unmatch(match)
