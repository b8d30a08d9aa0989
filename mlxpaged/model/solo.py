"""The one-at-a-time path: stock mlx-lm with its own caches behind the paged runner's interface. Serves what the block
pool cannot hold (recurrent states, latent attention, unknown caches). Owns the one row's caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..errors import InvariantError
from ..sched.requests import StepPlan
from ..sched.table import RequestTable
from .grammars import allowed_ids
from .runner import CatchUp, PendingStep
from .sampling import Sampled, Sampler
from .scoring import PromptScores


class SoloRunner:
    """Runs plans of a one-row table whose scheduler shares no blocks, so that every request starts at position 0."""

    def __init__(self, model: nn.Module, sampler: Sampler) -> None:
        self._model = model
        self._sampler = sampler
        self._epoch = -1
        self._cache: list[Any] = []

    @property
    def kv_bytes(self) -> int:
        return sum(int(getattr(cache, "nbytes", 0)) for cache in self._cache)

    def launch(self, plan: StepPlan, table: RequestTable, catch_up: CatchUp = lambda: None) -> PendingStep:
        """Start `plan`: its chunk, then its decode entry, on the row's own caches."""
        if table.epoch[0] != self._epoch:
            self._epoch, self._cache = int(table.epoch[0]), make_prompt_cache(self._model)
        sampled: Sampled | None = None
        arrays: list[Any] = []
        failed: dict[int, str] = {}
        scores = PromptScores.wanted(plan, table)
        for chunk in plan.chunks:  # one at most: there is one row
            logits = self._forward(table.token_ids[0, chunk.start : chunk.start + chunk.length])
            arrays = [cache.state for cache in self._cache if not cache.empty()]
            scores = scores.of(logits) if scores else None
        for position in plan.decode_positions.tolist():
            logits = self._forward(table.token_ids[0, position : position + 1])[-1:]
            allowed = None
            if table.constrained[0]:
                mx.async_eval(logits)
                allowed, failed = allowed_ids(plan, table, logits.shape[-1])
            sampled = self._sampler(logits, plan, table, allowed)
            arrays = [*sampled.arrays(), *self._sampler.state()]
        if np.any(plan.from_device):
            raise InvariantError("the one-at-a-time path runs no step ahead")
        arrays += scores.arrays() if scores else []
        mx.async_eval(arrays)
        asked = table.logprobs[plan.decode_rows]
        return PendingStep(sampled, arrays, asked[asked >= 0], scores, failed)

    def _forward(self, ids: np.ndarray) -> mx.array:
        """Logits [len(ids), vocabulary], lazily."""
        return self._model(mx.array(ids)[None], cache=self._cache)[0]

    def recover(self) -> bool:
        """After a failed step: start over with empty caches."""
        self._epoch, self._cache = -1, []
        self._sampler.reset()
        return True
