"""How many blocks of KV fit a budget. Pure arithmetic on numbers given by the caller; owns no memory."""

from __future__ import annotations

from collections.abc import Sequence

from ..sched.table import blocks_for


def plan_blocks(
    block_bytes: Sequence[int],
    windows: Sequence[int | None],
    *,
    budget_bytes: int,
    context_len: int,
    max_rows: int,
    step_budget: int,
) -> tuple[int, ...]:
    """Blocks of each KV group (the null block included) within `budget_bytes`.

    No group gets more than `max_rows` full contexts could use. A windowed group never needs more than its rows'
    windows and one chunk each; twice that lets prefixes stay findable. What is left goes to the other groups.
    """
    context_blocks = blocks_for(context_len)
    most = [
        min(context_blocks, 2 * (blocks_for(window + step_budget) + 2)) if window is not None else context_blocks
        for window in windows
    ]
    wanted = [max_rows * blocks + 1 for blocks in most]
    cost = sum(count * size for count, size in zip(wanted, block_bytes, strict=True))
    share = min(1.0, budget_bytes / cost) if cost else 1.0
    return tuple(
        max(2 + (blocks_for(window + step_budget) + 2 if window is not None else 0), int(count * share))
        for count, window in zip(wanted, windows, strict=True)
    )
