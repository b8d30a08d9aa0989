"""May a model's decode steps be replayed as graphs on this device, and as which? Owns one comparison: the same steps
built anew and replayed, several in flight at once. Never decides what else runs on kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..config import BLOCK_SIZE
from ..kernels.partitions import MOST_TOKENS
from ..sched.allocator import GroupSpec
from ..sched.requests import Chunk, StepPlan
from ..sched.table import RequestTable
from .compiled import DecodeGraphs, Graphs
from .fusedstep import why_not_fused
from .inputs import StepInputs, gather_inputs
from .kernelpool import KernelPool
from .linears import LinearWays
from .rotation import remove_rotations
from .runner import ModelRunner
from .sampling import Sampler
from .verdicts import remembered

_ROWS = 9  # a graph for nine is one for twelve, three of them empty

BLOCKS = 2 + _ROWS
"""What each group of the pool needs: the null block, one that all rows read as their past, and each row's own."""

_STEPS = 3  # the first makes the graph, the others replay it
_CONTEXTS = (BLOCK_SIZE, MOST_TOKENS)  # in one partition, and in several, which a second kernel merges
_AGREES = 3e-2

_NONE = np.zeros(0, np.int32)

Forward = Callable[[StepInputs], mx.array]


_RECORDS: dict[Graphs, str] = {"fused": "replay-fused", "plain": "replay"}


@dataclass(frozen=True, slots=True)
class Replay:
    """What may be replayed (None: nothing), and one line for what speaks against the better way where there is one."""

    graphs: Graphs | None
    why: str | None = None


def find_replay(
    model: nn.Module,
    config: dict[str, Any],
    context_len: int,
    make: Callable[[], KernelPool],
    linears: LinearWays | None,
    rope_write: bool = True,
) -> Replay:
    """The best graphs that give the logits of steps built anew: fused ones where `rope_write` works, else plain ones.
    The pool to `make` has BLOCKS blocks in each group and attends by kernels at every size. Not computed twice, see
    remembered() (then no pool is made either). The model's ropes stay installed where fused graphs are right."""

    def differs(kind: Graphs) -> str | None:
        try:
            error = remembered(_RECORDS[kind], model, config, lambda: _error(model, context_len, make(), linears, kind))
        except Exception as raised:  # whatever tracing or the device does not take
            lines = str(raised).strip().splitlines() or [""]
            return f"replaying them failed: {type(raised).__name__}: {lines[0]}".rstrip(": ")
        agrees = error is None or error <= _AGREES  # false for NaN
        return None if agrees else f"replayed, their logits are off by {error:.1%} of the largest"

    why_plain = (why_not_fused(model) or differs("fused")) if rope_write else "it failed its self-test"
    if why_plain is None:
        return Replay("fused")
    remove_rotations(model)
    why = differs("plain")
    return Replay("plain", why_plain) if why is None else Replay(None, why)


def _error(model: nn.Module, context_len: int, pool: KernelPool, linears: LinearWays | None, kind: Graphs) -> float:
    """The largest difference, relative to the largest logit."""
    groups = [GroupSpec(count, window) for count, window in zip(pool.num_blocks, pool.spec.windows, strict=True)]
    table = RequestTable(_ROWS, MOST_TOKENS + BLOCK_SIZE, len(groups))
    table.reserve(table.context_len)
    for block_ids in table.block_ids:
        block_ids[:] = 1
    table.token_ids[:] = np.random.default_rng(0).integers(0, pool.spec.vocab_size, table.token_ids.shape)
    runner = ModelRunner(model, pool, groups, Sampler(1, pool.spec.vocab_size), _ROWS, linears=linears)
    graphs = DecodeGraphs(model, pool, kind)
    ways: tuple[Forward, Forward] = (
        lambda inputs: runner.forward(inputs, slice(_ROWS)),
        lambda inputs: graphs(inputs, mx.array(inputs.ids)),
    )
    past = StepPlan(0, _NONE, _NONE, _NONE.astype(bool), (Chunk(0, 0, BLOCK_SIZE),))
    mx.eval(runner.forward(gather_inputs(past, table, groups), slice(1)), *pool.pending())
    errors = []
    for context in _CONTEXTS:
        if context + _ROWS + _STEPS > context_len:
            continue
        for block_ids in table.block_ids:
            block_ids[:] = 1
            block_ids[:, context // BLOCK_SIZE] = np.arange(2, 2 + _ROWS)
        anew, replayed = (_logits(forward, table, groups, context) for forward in ways)
        errors.append(np.abs(replayed - anew).max() / max(np.abs(anew).max(), 1e-9))
    return float(max(errors, default=0.0))


def _logits(forward: Forward, table: RequestTable, groups: list[GroupSpec], context: int) -> np.ndarray:
    """[steps, rows, vocabulary] of a few decode steps after `context` tokens and more, no two rows at one position; all
    are launched before one is read."""
    rows, steps = np.arange(_ROWS, dtype=np.int32), []
    for position in range(context, context + _STEPS):
        plan = StepPlan(0, rows, position + rows, np.zeros(_ROWS, bool), ())
        steps.append(forward(gather_inputs(plan, table, groups)))
        mx.async_eval(steps[-1])
    return np.array(mx.stack(steps).astype(mx.float32))
