"""Does the paged path compute what stock mlx-lm computes for this very model? Owns the comparison; changes nothing but
the seam it tests."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..sched.allocator import GroupSpec
from ..sched.requests import Chunk, StepPlan
from ..sched.table import RequestTable, blocks_for
from .inputs import gather_inputs
from .kvspec import KVSpec
from .plainpool import PlainPool
from .runner import ModelRunner
from .sampling import Sampler
from .verdicts import remembered

_TOKENS = 24
_LIMIT_S = 5.0


def differs_from_stock(model: nn.Module, spec: KVSpec, config: dict[str, Any]) -> str | None:
    """None when the logits of 24 tokens in two chunks agree with stock mlx-lm (1e-4 of the largest at float32, 3%
    otherwise) or when finding out would take too long; else one line that says how far they are apart. Not computed
    twice: see remembered()."""
    error = remembered("stock", model, config, lambda: _error(model, spec))
    exact = all(layer.dtype == mx.float32 for layer in spec.layers)
    agrees = error is None or error <= (1e-4 if exact else 3e-2)  # false for NaN
    return None if agrees else f"its logits differ from mlx-lm's by {error:.1%} of the largest"


def _error(model: nn.Module, spec: KVSpec) -> float | None:
    """The largest difference, relative to the largest logit; None: too slow a machine to find out."""
    started = time.monotonic()
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, _TOKENS).astype(np.int32)
    stock = _stock(model, ids[: _TOKENS // 2])
    if (time.monotonic() - started) * 4 > _LIMIT_S:
        return None
    stock = _stock(model, ids)
    paged = _paged(model, spec, ids)
    return float(np.abs(paged - stock).max() / max(np.abs(stock).max(), 1e-9))


def _stock(model: nn.Module, ids: np.ndarray) -> np.ndarray:
    cache = make_prompt_cache(model)
    half = len(ids) // 2
    parts = [model(mx.array(part)[None], cache=cache)[0].astype(mx.float32) for part in (ids[:half], ids[half:])]
    return np.array(mx.concatenate(parts))


def _paged(model: nn.Module, spec: KVSpec, ids: np.ndarray) -> np.ndarray:
    """The same tokens as two chunks of row 0 over blocks in scattered order."""
    num_blocks = blocks_for(len(ids)) + 2
    groups = [GroupSpec(num_blocks, window) for window in spec.windows]
    table = RequestTable(1, len(ids), len(groups))
    table.token_ids[0, : len(ids)] = ids
    for block_ids in table.block_ids:
        block_ids[0] = np.arange(len(block_ids[0]), 0, -1)
    runner = ModelRunner(model, PlainPool(spec, [num_blocks] * len(groups)), groups, Sampler(1, spec.vocab_size), 1)
    half, parts = len(ids) // 2, []
    none = np.zeros(0, np.int32)
    for start in (0, half):
        plan = StepPlan(0, none, none, none.astype(bool), (Chunk(0, start, half),))
        parts.append(runner.forward(gather_inputs(plan, table, groups), slice(half)).astype(mx.float32))
        mx.eval(parts[-1])
    return np.concatenate([np.array(part) for part in parts])
