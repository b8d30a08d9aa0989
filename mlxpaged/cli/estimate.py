"""`mlxpaged load MODEL --estimate`: what a model would take on this machine. Loads nothing; owns the words."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..config import EngineConfig
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
    served_by, reason = "paged" if paged else "one at a time", refusal(plan)
    if as_json:
        print(json.dumps(asdict(plan) | {"fits": plan.fits, "served_by": served_by, "refusal": reason}))
    else:
        for name, value in _facts(plan, served_by):
            print(f"{name:13}{value}")
        print(reason or "it fits")
    return 0 if plan.fits else 1


def _facts(plan: MemoryPlan, served_by: str) -> list[Fact]:
    from ..model.memplan import gib

    pool = f"{gib(plan.kv_bytes)}, {plan.token_bytes / 1024:.1f} KiB a token, "
    blocks = " + ".join(f"{count - 1:,}" for count in plan.most_blocks)
    begins = " + ".join(f"{count - 1:,}" for count in plan.start_blocks)
    facts = [
        ("model", f"{plan.name}, served {served_by}"),
        ("limit", f"{gib(plan.limit_bytes)}, by {plan.limited_by}"),
        ("weights", gib(plan.weights_bytes)),
        ("work", f"{gib(plan.chunk_bytes)} for a step, {gib(plan.cache_bytes)} kept for reuse"),
        ("K/V", f"{pool}{blocks} blocks of 16 tokens at most, {begins} to begin with"),
        ("context", f"{min(plan.context_len, plan.largest_context):,} tokens of {plan.context_len:,}"),
    ]
    if plan.fixed_bytes:
        facts.insert(5, ("state", f"{gib(plan.fixed_bytes)} a request"))
    return facts
