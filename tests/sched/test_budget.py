"""The step budget follows the device, not the other way round."""

from __future__ import annotations

from mlxpaged.sched.budget import LEAST, MOST, StepBudget


def test_a_fixed_budget_stays() -> None:
    budget = StepBudget(96)
    budget.observe(512, 0.001)
    assert budget.tokens(True) == budget.tokens(False) == budget.most == 96


def test_a_step_lasts_about_the_target_and_twice_that_when_no_reply_waits() -> None:
    budget = StepBudget(target_s=0.25)
    for _ in range(20):
        budget.observe(512, 0.5)  # 1024 tokens a second
    assert budget.tokens(True) == 256
    assert budget.tokens(False) == 512


def test_slow_and_fast_devices_stay_within_bounds() -> None:
    slow, fast = StepBudget(), StepBudget()
    for _ in range(20):
        slow.observe(64, 10.0)
        fast.observe(2048, 0.01)
    assert slow.tokens(True) == LEAST and fast.tokens(True) == MOST


def test_a_cpu_begins_at_its_ceiling_and_takes_less_where_contexts_are_long() -> None:
    budget = StepBudget(target_s=0.4, least=16, ceiling=64)
    assert budget.tokens(True) == budget.most == 64
    for _ in range(20):
        budget.observe(64, 0.1)
    assert budget.tokens(True) == 64
    for _ in range(20):
        budget.observe(budget.tokens(True), 1.5)
    assert budget.tokens(True) == 16


def test_small_steps_say_nothing_of_speed() -> None:
    budget = StepBudget()
    before = budget.tokens(True)
    budget.observe(8, 1.0)
    assert budget.tokens(True) == before


def test_a_long_context_shrinks_later_chunks() -> None:
    budget = StepBudget()
    for _ in range(10):
        budget.observe(2048, 0.2)
    early = budget.tokens(True)
    for _ in range(10):
        budget.observe(early, 2.0)
    assert budget.tokens(True) < early
