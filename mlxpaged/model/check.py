"""Does the paged path compute what stock mlx-lm computes for this very model? Owns the comparison and its memory of
past results; changes nothing but the seam it tests."""

from __future__ import annotations

import hashlib
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from .. import __version__
from ..paths import cache_dir
from ..sched.allocator import GroupSpec
from ..sched.requests import Chunk, StepPlan
from ..sched.table import RequestTable, blocks_for
from .inputs import gather_inputs
from .kvspec import KVSpec
from .plainpool import PlainPool
from .runner import ModelRunner
from .sampling import Sampler

_TOKENS = 24
_LIMIT_S = 5.0


def differs_from_stock(model: nn.Module, spec: KVSpec, config: dict[str, Any]) -> str | None:
    """None when the logits of 24 tokens in two chunks agree with stock mlx-lm (1e-4 of the largest at float32, 3%
    otherwise) or when finding out would take too long; else one line that says how far they are apart.

    A verdict is kept by (model's config and size, versions, device) and not computed twice.
    """
    record = cache_dir() / "checks" / f"{_fingerprint(model, config)}.json"
    known = _read(record)
    if known is not None:
        return known["difference"]
    started = time.monotonic()
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, _TOKENS).astype(np.int32)
    stock = _stock(model, ids[: _TOKENS // 2])
    if (time.monotonic() - started) * 4 > _LIMIT_S:
        return None
    stock = _stock(model, ids)
    paged = _paged(model, spec, ids)
    error = float(np.abs(paged - stock).max() / max(np.abs(stock).max(), 1e-9))
    exact = all(layer.dtype == mx.float32 for layer in spec.layers)
    agrees = np.isfinite(error) and error <= (1e-4 if exact else 3e-2)
    difference = None if agrees else f"its logits differ from mlx-lm's by {error:.1%} of the largest"
    _write(record, {"difference": difference, "error": error})
    return difference


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


def _fingerprint(model: nn.Module, config: dict[str, Any]) -> str:
    device = f"{mx.default_device()} {mx.device_info().get('device_name', '') if mx.metal.is_available() else ''}"
    shapes = [(name, list(array.shape), str(array.dtype)) for name, array in _flat(model)]
    text = json.dumps(
        [config, shapes, version("mlx"), version("mlx-lm"), __version__, device], sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _flat(model: nn.Module) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())


def _read(record: Path) -> dict[str, Any] | None:
    try:
        return json.loads(record.read_text())
    except (OSError, ValueError):
        return None


def _write(record: Path, verdict: dict[str, Any]) -> None:
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        partial = record.with_suffix(".part")
        partial.write_text(json.dumps(verdict))
        partial.replace(record)
    except OSError:
        pass  # a read-only home costs a second at the next start, no more
