"""From a loaded model to an engine core: which path serves it, how its KV is grouped, how much of it fits. Called on the
MLX thread; owns nothing afterwards."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import mlx.core as mx

from ..config import EngineConfig
from ..model.check import differs_from_stock
from ..model.kvplan import plan_blocks
from ..model.kvpool import KVPool
from ..model.kvspec import KVSpec, NotPaged, probe
from ..model.loader import LoadedModel
from ..model.memory import free_memory
from ..model.runner import ModelRunner
from ..model.sampling import Sampler
from ..model.seam import remove_gather_norm
from ..model.solo import SoloRunner
from ..sched.allocator import GroupSpec
from ..sched.scheduler import Scheduler
from ..sched.table import RequestTable, blocks_for
from .core import EngineCore

log = logging.getLogger(__name__)

_CPU_CONTEXTS = 4
"""On a CPU the pool holds so many full contexts at most, unless --memory-budget says otherwise."""


@dataclass(frozen=True)
class Built:
    """An engine core and how it came about: `served_by` "paged" or "one at a time", and lines worth reading once."""

    core: EngineCore
    served_by: str
    vocab_size: int
    context_len: int
    notes: tuple[str, ...] = ()


def build(loaded: LoadedModel, config: EngineConfig) -> Built:
    """The engine for `loaded`: paged where the probe and the comparison with stock mlx-lm allow it, else one request
    at a time, with a note that says why."""
    context_len = min(loaded.context_len, config.context_len or loaded.context_len)
    try:
        spec = probe(loaded.model)
        reason = differs_from_stock(loaded.model, spec, loaded.config)
        if reason is None:
            return _paged(loaded, spec, config, context_len)
    except NotPaged as error:
        reason = str(error)
    note = f"{loaded.name} is served one request at a time by stock mlx-lm: {reason}"
    log.warning(note)
    return _solo(loaded, config, context_len, note)


def on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def _paged(loaded: LoadedModel, spec: KVSpec, config: EngineConfig, context_len: int) -> Built:
    step_budget = config.step_budget or (512 if on_gpu() else 64)
    block_bytes = [spec.block_bytes(group) for group in range(len(spec.windows))]
    if config.num_blocks is not None:
        num_blocks: tuple[int, ...] = (config.num_blocks,) * len(spec.windows)
    else:
        num_blocks = plan_blocks(
            block_bytes,
            spec.windows,
            budget_bytes=config.memory_budget or free_memory() // 2,
            context_len=context_len,
            max_rows=config.max_rows if on_gpu() or config.memory_budget else min(config.max_rows, _CPU_CONTEXTS),
            step_budget=step_budget,
        )
    groups = [GroupSpec(count, window) for count, window in zip(num_blocks, spec.windows, strict=True)]
    table = RequestTable(config.max_rows, context_len, len(groups))
    sampler = Sampler(config.max_rows, spec.vocab_size)
    runner = ModelRunner(loaded.model, KVPool(spec, num_blocks), groups, sampler, config.max_rows)
    scheduler = Scheduler(table, groups, step_budget=step_budget, max_queue=config.max_queue, share=config.prefix_cache)
    core = EngineCore(scheduler, runner, ahead=config.ahead or 0)
    return Built(core, "paged", spec.vocab_size, context_len)


def _solo(loaded: LoadedModel, config: EngineConfig, context_len: int, note: str) -> Built:
    remove_gather_norm(loaded.model)
    vocab_size = int(loaded.model(mx.zeros((1, 1), mx.int32)).shape[-1])
    groups = [GroupSpec(blocks_for(context_len) + 1)]
    scheduler = Scheduler(
        RequestTable(1, context_len),
        groups,
        step_budget=config.step_budget or (512 if on_gpu() else 64),
        max_queue=config.max_queue,
        share=False,
    )
    core = EngineCore(scheduler, SoloRunner(loaded.model, Sampler(1, vocab_size)))
    return Built(core, "one at a time", vocab_size, context_len, (note,))
