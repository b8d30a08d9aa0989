"""From a loaded model to an engine core. Owns nothing afterwards; called on the MLX thread."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import EngineConfig
from ..model.loader import LoadedModel
from ..model.serving import serve
from ..sched.scheduler import Scheduler
from ..sched.table import RequestTable
from .core import EngineCore

_SCORED_BYTES = 64 * 2**20
"""Logits of prompt tokens that one step may hold, in float32."""


@dataclass(frozen=True)
class Built:
    """An engine core and how it came about; see model/serving.py for the fields."""

    core: EngineCore
    served_by: str
    vocab_size: int
    context_len: int
    notes: tuple[str, ...]


def build(loaded: LoadedModel, config: EngineConfig) -> Built:
    """The engine for `loaded`, by whichever path can serve it."""
    served = serve(loaded, config)
    scheduler = Scheduler(
        RequestTable(served.num_rows, served.context_len, len(served.groups)),
        served.groups,
        step_budget=served.budget.most,
        max_queue=config.max_queue,
        score_budget=max(1, _SCORED_BYTES // (4 * served.vocab_size)),
        share=served.share,
    )
    core = EngineCore(scheduler, served.runner, ahead=served.ahead, budget=served.budget, resize=served.resize)
    return Built(core, served.path, served.vocab_size, served.context_len, served.notes)
