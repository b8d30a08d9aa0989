"""A picture of the engine between two steps, for faces. Pure reading; owns nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .events import EngineStats, ModelInfo, RowStats
from .replies import Replies

if TYPE_CHECKING:
    from .core import EngineCore  # importing it imports mlx, and the service must open the system's BLAS before


def snapshot(core: EngineCore | None, info: ModelInfo | None, replies: Replies, now: float) -> EngineStats:
    """The state of `core` now (seconds of the monotonic clock); zeros before a model is loaded."""
    if core is None:
        return EngineStats(model=info.name if info else None)
    scheduler, table = core.scheduler, core.scheduler.table
    ages = {reply.request.request_id: now - reply.opened for reply in replies.live()}
    rows, running = [], 0
    for live in scheduler.live():
        row, prompt = live.row, len(live.request.prompt)
        running += row is not None
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
                ages.get(live.request.request_id, 0.0),
            )
        )
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
        heartbeat_s=0.0,
    )
