"""What a step's intermediate arrays really take, measured once after loading. Owns two small steps over a pool that
holds nothing yet; called on the MLX thread, where the device counts its memory."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from ..config import BLOCK_SIZE
from ..sched.allocator import GroupSpec
from ..sched.requests import Chunk, StepPlan
from ..sched.table import RequestTable
from .inputs import gather_inputs
from .memplan import Work
from .runner import ModelRunner

_TOKENS = (64, 256)


def measured(runner: ModelRunner, work: Work) -> Work:
    """`work` with the cost of a step and of each of its tokens as two prompt chunks showed it."""
    most = (min(runner.pool.num_blocks) - 1) * BLOCK_SIZE
    few, many = (min(tokens, most) for tokens in _TOKENS)
    if few >= many:
        return work
    _chunk_peak(runner, many)  # kernels are compiled, and what lasts is in place
    small, large = _chunk_peak(runner, few), _chunk_peak(runner, many)
    token_bytes = max(0.0, (large - small) / (many - few))
    return replace(work, token_bytes=token_bytes, step_bytes=int(max(0.0, large - token_bytes * many)))


def _chunk_peak(runner: ModelRunner, tokens: int) -> int:
    """Bytes beyond those held before and after, at most, while a chunk of `tokens` runs. It writes to blocks that
    nobody holds."""
    pool = runner.pool
    groups = [GroupSpec(count, window) for count, window in zip(pool.num_blocks, pool.spec.windows, strict=True)]
    table = RequestTable(1, tokens, len(groups))
    table.reserve(tokens)
    for block_ids in table.block_ids:
        block_ids[0] = np.arange(1, len(block_ids[0]) + 1)
    none = np.zeros(0, np.int32)
    plan = StepPlan(0, none, none, none.astype(bool), (Chunk(0, 0, tokens),))
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    logits = runner.forward(gather_inputs(plan, table, groups), slice(1))
    mx.eval(logits, *pool.pending())
    return max(0, mx.get_peak_memory() - before)
