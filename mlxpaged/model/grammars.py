"""The ids that grammars allow in one step, as a device mask. Owns nothing; the grammars belong to their requests."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..sched.requests import StepPlan
from ..sched.table import RequestTable

_ALL = np.uint32(0xFFFFFFFF)


def allowed_ids(plan: StepPlan, table: RequestTable, vocab_size: int) -> tuple[mx.array, dict[int, str]]:
    """bool [B, V] for the plan's decode entries, all True for rows without a grammar; and the rows whose grammar
    raised, with what it said: one row's fault ends one row."""
    words = np.full((len(plan.decode_rows), -(-vocab_size // 32)), _ALL)
    failed: dict[int, str] = {}
    for entry, row in enumerate(plan.decode_rows.tolist()):
        request = table.requests[row]
        if request is None or request.grammar is None:
            continue
        words[entry] = 0
        try:
            request.grammar.fill(words[entry])
            if not words[entry].any():
                raise ValueError("no token may follow")
        except Exception as error:
            failed[row] = f"the grammar failed: {error}"
            words[entry] = _ALL
    bits = mx.array(words)[:, :, None] >> mx.arange(32, dtype=mx.uint32)
    return (bits & 1).astype(mx.bool_).reshape(len(words), -1)[:, :vocab_size], failed
