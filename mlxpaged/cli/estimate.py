"""`mlxpaged load MODEL --estimate`: what a model would take on this machine. Loads nothing; owns the words."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..config import BLOCK_SIZE, EngineConfig
from .exits import complain

if TYPE_CHECKING:
    from ..model.memplan import MemoryPlan

Fact = tuple[str, str]


def show_estimate(model: str, config: EngineConfig, as_json: bool) -> int:
    """Print the memory plan for a model on this disk; the exit code is 1 when it would not fit."""
    from ..model.sources import resolve
    from ..model.startup import before_mlx

    source = resolve(model, fetch=False)
    before_mlx()
    from ..model.estimate import cut_context, estimate
    from ..model.memplan import refusal

    plan, paged = estimate(source, config)
    for note in cut_context(plan.name, config.context_len, plan.context_len):
        complain(note)
    reason = refusal(plan)
    if as_json:
        print(json.dumps(asdict(plan) | {"fits": plan.fits, "served_by": _served_by(paged), "refusal": reason}))
    else:
        for name, value in _facts(plan, paged, config):
            print(f"{name:13}{value}")
        print(reason or "it fits")
    return 0 if plan.fits else 1


def _served_by(paged: bool) -> str:
    return "paged" if paged else "one at a time"


def _facts(plan: MemoryPlan, paged: bool, config: EngineConfig) -> list[Fact]:
    from ..model.memplan import gib

    facts = [
        ("model", f"{plan.name}, served {_served_by(paged)}"),
        ("limit", f"{gib(plan.limit_bytes)}, by {plan.limited_by}"),
        ("weights", gib(plan.weights_bytes)),
        ("work", f"{gib(plan.chunk_bytes)} for a step, {gib(plan.cache_bytes)} kept for reuse"),
        ("K/V", f"{plan.token_bytes / 1024:.1f} KiB a token, room for {gib(plan.kv_bytes)}"),
    ]
    if plan.fits and plan.most_blocks:
        facts.append(("pool", _pool(plan, paged, config)))
    if plan.fixed_bytes:
        facts.append(("state", f"{gib(plan.fixed_bytes)} a request"))
    return [*facts, ("context", f"{min(plan.context_len, plan.largest_context):,} tokens of {plan.context_len:,}")]


def _pool(plan: MemoryPlan, paged: bool, config: EngineConfig) -> str:
    """How large the pool of K/V gets, and what keeps it from getting larger."""
    from ..model.memplan import gib

    blocks = " + ".join(f"{count - 1:,}" for count in plan.most_blocks)
    begins = " + ".join(f"{count - 1:,}" for count in plan.start_blocks)
    size = f"{blocks} blocks of {BLOCK_SIZE} tokens at most ({gib(plan.most_bytes)}), {begins} to begin with"
    if plan.most_contexts is None:
        return f"{size}; there is no room for more"
    if not paged:
        return f"{size}; that is one full context"
    rows = plan.most_contexts
    bound = f"--max-num-seqs {rows}" if rows == config.max_rows else "a CPU's limit unless --memory-budget is given"
    return f"{size}; that is {rows:,} full context{'s' * (rows != 1)}, {bound}"
