"""One step on the device: gather, forward, sample. Owns the model, its pool and the device-side ids; never decides what
runs, never frees, never reads text.

    pending = runner.launch(plan, table)      # builds the graph and starts it
    result = pending.wait()                   # the one host synchronisation of a step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..sched.allocator import GroupSpec
from ..sched.requests import StepPlan, StepResult
from ..sched.table import RequestTable
from .attention import AttentionStep
from .compiled import DecodeGraphs, Graphs
from .grammars import allowed_ids
from .inputs import StepInputs, gather_inputs
from .kernelpool import KernelPool
from .kvpool import KVPool
from .lasttokens import LastTokens
from .linears import LinearWays, flatten_linears
from .sampling import Sampled, Sampler
from .scoring import PromptScores
from .seam import GatherNorm, install_attention, install_gather_norm


@dataclass(frozen=True)
class PendingStep:
    """A launched step. `sampled` is None when it had no decode entry; then `arrays` still tell when it is done.
    `scores` None: no logprobs of prompt ids were asked for."""

    sampled: Sampled | None
    arrays: list[mx.array]
    top: np.ndarray
    scores: PromptScores | None = None
    failed: dict[int, str] = field(default_factory=dict)  # rows whose grammar raised, and what

    def wait(self) -> StepResult:
        """Block until the device is done; raises what the device raised."""
        mx.eval(self.arrays)
        result = StepResult(np.zeros(0, np.int32)) if self.sampled is None else self.sampled.result(self.top)
        return replace(result, prompt_logprobs=self.scores.result()) if self.scores else result


CatchUp = Callable[[], None]


class Runner(Protocol):
    """Runs plans: the paged runner, or stock mlx-lm one request at a time."""

    def launch(self, plan: StepPlan, table: RequestTable, catch_up: CatchUp) -> PendingStep:
        """Start `plan`. Where a grammar must know the ids of steps in flight, `catch_up` commits those."""

    def recover(self) -> bool: ...

    @property
    def kv_bytes(self) -> int: ...


class ModelRunner:
    """An unmodified mlx-lm model over the block pool. `graphs`: replay decode steps as such (compiled.py).
    `linears`: how its products are computed (linears.py)."""

    def __init__(
        self,
        model: nn.Module,
        pool: KVPool,
        groups: Sequence[GroupSpec],
        sampler: Sampler,
        num_rows: int,
        *,
        graphs: Graphs | None = None,
        linears: LinearWays | None = None,
    ) -> None:
        self._model = model
        self._groups = tuple(groups)
        self._sampler = sampler
        self._last_tokens = LastTokens(num_rows)
        install_attention(model)
        flatten_linears(model, linears)
        self._norm: GatherNorm | None = install_gather_norm(model)
        self.pool = pool
        self._graphs = DecodeGraphs(model, pool, graphs) if graphs and isinstance(pool, KernelPool) else None

    @property
    def kv_bytes(self) -> int:
        return self.pool.nbytes

    def launch(self, plan: StepPlan, table: RequestTable, catch_up: CatchUp = lambda: None) -> PendingStep:
        """Start `plan`. The table is read before this returns, and not after."""
        inputs = gather_inputs(plan, table, self._groups)
        self.pool.copy(plan.copies)
        sampled: Sampled | None = None
        failed: dict[int, str] = {}
        scores = PromptScores.wanted(plan, table)
        logits = self.forward(inputs, _wanted_rows(inputs.num_decode, scores))
        if scores is not None:
            scores = scores.of(logits[inputs.num_decode :])
            logits = logits[: inputs.num_decode]
        if inputs.num_decode:
            allowed = None
            if table.constrained[plan.decode_rows].any():
                mx.async_eval(logits)  # the masks are made on the host while the forward runs
                catch_up()
                allowed, failed = allowed_ids(plan, table, logits.shape[-1])
            sampled = self._sampler(logits, plan, table, allowed)
            self._last_tokens.put(inputs.decode_rows, sampled.tokens)
        # Chunk-only steps evaluate no logits: the head and the last layer's attention are never run.
        arrays = [
            *self.pool.pending(),
            *self._last_tokens.state(),
            *self._sampler.state(),
            *(sampled.arrays() if sampled else []),
            *(scores.arrays() if scores else []),
        ]
        mx.async_eval(arrays)
        asked = table.logprobs[plan.decode_rows]
        return PendingStep(sampled, arrays if sampled is None else [], asked[asked >= 0], scores, failed)

    def forward(self, inputs: StepInputs, rows: slice | mx.array) -> mx.array:
        """Logits [rows, vocabulary] of the tokens at `rows`, lazily; K and V of all tokens go to the pool."""
        ids = self._ids(inputs)
        if self._graphs is not None and self._graphs.serves(inputs):
            return self._graphs(inputs, ids)[rows]
        step = AttentionStep.of(inputs, self.pool)
        if self._norm is None:
            return self._model(ids[:, None], cache=step.layers())[rows, 0]
        with self._norm.picking(rows):
            return self._model(ids[:, None], cache=step.layers())[:, 0]

    def _ids(self, inputs: StepInputs) -> mx.array:
        """int32 [T]: the step's input, those ids that the host has not seen from the device."""
        entries = inputs.device_entries
        if len(entries) == 0:
            return mx.array(inputs.ids)
        newest = self._last_tokens.take(inputs.decode_rows[entries])
        if len(entries) == len(inputs.ids):
            return newest
        ids = mx.array(inputs.ids)
        ids[mx.array(entries)] = newest
        return ids

    def resize(self, num_blocks: Sequence[int]) -> None:
        """Another size for the pool; no step may be in flight. See KVPool.resize."""
        mx.synchronize()
        self._forget_graphs()
        self.pool.resize(num_blocks)

    def _forget_graphs(self) -> None:
        """They hold the pool's arrays, which are about to be replaced."""
        if self._graphs is not None:
            self._graphs.clear()

    def recover(self) -> bool:
        """After a failed step: whether the pool's arrays are still usable; if not they are new ones. Their contents
        beyond what was committed do not matter; nothing that hung on the failed step is evaluated again. Raises what
        the device raises where there is no room for a pool any more."""
        self._last_tokens.reset()
        self._sampler.reset()
        if self._graphs is not None:
            self._graphs.reset()
        try:
            mx.synchronize()
            mx.eval(self.pool.pending())
        except Exception:  # whatever the device raised, the pool cannot be trusted
            self._forget_graphs()
            self.pool.renew()
            return False
        return True


def _wanted_rows(num_decode: int, scores: PromptScores | None) -> slice | mx.array:
    """The tokens of a step whose logits are wanted: its decode entries, which come first, then the scored ones."""
    if scores is None:
        return slice(max(num_decode, 1))
    return mx.array(np.concatenate([np.arange(num_decode, dtype=np.int32), scores.entries]))
