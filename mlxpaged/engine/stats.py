"""A picture of the engine between two steps, for faces. Pure reading; owns nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..sched.blocks import CACHED, FREE, SHARED
from ..sched.scheduler import Scheduler
from .events import BlockRun, EngineStats, ModelInfo, RowStats
from .replies import Replies, Reply

if TYPE_CHECKING:
    from .core import EngineCore  # importing it imports mlx, and the service must open the system's BLAS before

_NAMES = {SHARED: "shared", CACHED: "cached", FREE: "free"}


def snapshot(core: EngineCore | None, info: ModelInfo | None, replies: Replies, now: float) -> EngineStats:
    """The state of `core` now (seconds of the monotonic clock); zeros before a model is loaded."""
    if core is None:
        return EngineStats(model=info.name if info else None)
    from ..model.serving import memory_use

    scheduler, rows = core.scheduler, _rows(core.scheduler, replies, now)
    running = sum(row.state != "queued" for row in rows)
    active, peak, kept = memory_use()
    counts = [pool.counts() for pool in scheduler.blocks.pools]
    return EngineStats(
        model=info.name if info else None,
        rows=tuple(rows),
        num_running=running,
        num_waiting=len(rows) - running,
        blocks_total=sum(pool.num_blocks - 1 for pool in scheduler.blocks.pools),
        blocks_used=sum(count["used"] for count in counts),
        blocks_shared=sum(count["shared"] for count in counts),
        blocks_cached=sum(count["cached"] for count in counts),
        blocks_free=sum(count["free"] for count in counts),
        steps=scheduler.steps,
        prompt_tokens=scheduler.prompt_tokens,
        generated_tokens=scheduler.generated_tokens,
        cached_tokens=scheduler.cached_tokens,
        preemptions=scheduler.preemptions,
        evictions=sum(pool.evictions for pool in scheduler.blocks.pools),
        memory_bytes=core.runner.kv_bytes,
        block_runs=tuple(_block_runs(scheduler, group) for group in range(len(counts))),
        memory_active_bytes=active,
        memory_peak_bytes=peak,
        memory_cache_bytes=kept,
        load_s=info.load_s if info else 0.0,
    )


def _rows(scheduler: Scheduler, replies: Replies, now: float) -> list[RowStats]:
    table, places = scheduler.table, scheduler.queue.places()
    opened = {reply.request.request_id: reply for reply in replies.live()}
    rows = []
    for live in scheduler.live():
        row, prompt = live.row, len(live.request.prompt)
        reply = opened.get(live.request.request_id)
        computed = int(table.computed[row]) if row is not None else 0
        state = "queued" if row is None else "decode" if computed >= prompt else "prefill"
        held = int((table.num_blocks[:, row] - table.first_block[:, row]).sum()) if row is not None else 0
        rows.append(
            RowStats(
                live.request.request_id,
                state,
                prompt,
                computed,
                live.generated,
                live.cached_tokens or 0,
                held,
                now - reply.opened if reply else 0.0,
                _rate(reply, now),
                places.get(live.request.request_id),
            )
        )
    return rows


def _rate(reply: Reply | None, now: float) -> float:
    """Tokens a second since the first one."""
    if reply is None or reply.first_token is None or now <= reply.first_token:
        return 0.0
    return (reply.tokens - 1) / (now - reply.first_token)


def _block_runs(scheduler: Scheduler, group: int) -> tuple[BlockRun, ...]:
    """Whose the blocks of one KV group are, run by run."""
    owners = scheduler.blocks.pools[group].marks()
    for live in scheduler.live():
        if live.row is not None:
            held = scheduler.table.held(group, live.row)
            held = held[owners[held] == 0]
            owners[held] = live.request.request_id
    owners = owners[1:]
    ends = np.append(np.flatnonzero(np.diff(owners)), len(owners) - 1)
    counts = np.diff(ends, prepend=-1)
    return tuple(
        BlockRun(_NAMES.get(owner, owner), count)
        for owner, count in zip(owners[ends].tolist(), counts.tolist(), strict=True)
    )
