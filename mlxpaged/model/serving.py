"""From loaded weights to something that runs plans: which path serves a model, how its KV is grouped, how much of it
fits. Called on the MLX thread; owns nothing afterwards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..config import EngineConfig
from ..kernels.choose import AttentionPath
from ..sched.allocator import GroupSpec
from ..sched.budget import StepBudget
from ..sched.table import blocks_for
from .attention_path import attention_path
from .check import differs_from_stock
from .kernelpool import KernelPool
from .kvplan import plan_blocks
from .kvpool import KVPool
from .kvspec import KVSpec, NotPaged, probe
from .loader import LoadedModel
from .memory import free_memory
from .plainpool import PlainPool
from .runner import ModelRunner, Runner
from .sampling import Sampler
from .seam import remove_gather_norm
from .solo import SoloRunner

log = logging.getLogger(__name__)

CPU_STEP_BUDGET = 64

CUDA_DENSE_ABOVE = 16
"""Rows from which unpacking a quantised weight and using the dense product is the faster way on CUDA."""

CUDA_ROUND_CHUNKS = 256

_CPU_CONTEXTS = 4
"""On a CPU the pool holds so many full contexts at most, unless --memory-budget says otherwise."""


@dataclass(frozen=True)
class Served:
    """A runner and what its scheduler must know: `groups` of KV, `num_rows` at once, tokens a step (`budget`),
    whether prefixes are shared, how many steps it runs `ahead`. `path` is "paged" or "one at a time"; `notes` are
    lines worth reading once."""

    runner: Runner
    groups: tuple[GroupSpec, ...]
    num_rows: int
    budget: StepBudget
    share: bool
    ahead: int
    path: str
    vocab_size: int
    context_len: int
    notes: tuple[str, ...] = ()


def on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def serve(loaded: LoadedModel, config: EngineConfig) -> Served:
    """The runner for `loaded`: paged where the probe and the comparison with stock mlx-lm allow it, else one request
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


def release_memory() -> None:
    """Give what MLX keeps for reuse back to the system."""
    mx.clear_cache()


def memory_use() -> tuple[int, int, int]:
    """Bytes that MLX holds now, held at most, and keeps for reuse."""
    return mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory()


def end_thread() -> None:
    """The calling thread uses MLX no more. Without this the interpreter may abort at its exit."""
    mx.synchronize()
    mx.clear_streams()


def _budget(config: EngineConfig) -> StepBudget:
    return StepBudget(config.step_budget if on_gpu() else config.step_budget or CPU_STEP_BUDGET)


def _paged(loaded: LoadedModel, spec: KVSpec, config: EngineConfig, context_len: int) -> Served:
    budget, num_rows = _budget(config), config.max_rows
    if config.num_blocks is not None:
        num_blocks: tuple[int, ...] = (config.num_blocks,) * len(spec.windows)
    else:
        num_blocks = plan_blocks(
            [spec.block_bytes(group) for group in range(len(spec.windows))],
            spec.windows,
            budget_bytes=config.memory_budget or free_memory() // 2,
            context_len=context_len,
            max_rows=num_rows if on_gpu() or config.memory_budget else min(num_rows, _CPU_CONTEXTS),
            step_budget=budget.most,
        )
    groups = tuple(GroupSpec(count, window) for count, window in zip(num_blocks, spec.windows, strict=True))
    sampler = Sampler(num_rows, spec.vocab_size)
    path = attention_path(spec, config.attention, log.warning)
    runner = ModelRunner(
        loaded.model, make_pool(spec, num_blocks, path), groups, sampler, num_rows, **_ways(path, config)
    )
    return Served(
        runner,
        groups,
        num_rows,
        budget,
        share=config.prefix_cache,
        # A plain pool is written in place only while nothing in flight reads it: one step ahead it would be copied.
        ahead=config.ahead if config.ahead is not None else int(path.launcher is not None),
        path="paged",
        vocab_size=spec.vocab_size,
        context_len=context_len,
        notes=(path.warning,) if path.warning else (),
    )


def _ways(path: AttentionPath, config: EngineConfig) -> dict[str, Any]:
    """How the runner builds its steps on this device."""
    return {
        "compiled": config.compiled and path.launcher is not None,
        "dense_above": CUDA_DENSE_ABOVE if path.device.kind == "cuda" else None,
    }


def make_pool(spec: KVSpec, num_blocks: Sequence[int], path: AttentionPath) -> KVPool:
    """The pool that `path` asks for."""
    if path.launcher is None:
        return PlainPool(spec, num_blocks)
    rounded = CUDA_ROUND_CHUNKS if path.device.kind == "cuda" else None
    return KernelPool(spec, num_blocks, path.launcher, path.choice.use_kernel, rounded)


def _solo(loaded: LoadedModel, config: EngineConfig, context_len: int, note: str) -> Served:
    remove_gather_norm(loaded.model)
    vocab_size = int(loaded.model(mx.zeros((1, 1), mx.int32)).shape[-1])
    runner = SoloRunner(loaded.model, Sampler(1, vocab_size))
    groups = (GroupSpec(blocks_for(context_len) + 1),)
    return Served(
        runner,
        groups,
        num_rows=1,
        budget=_budget(config),
        share=False,
        ahead=0,
        path="one at a time",
        vocab_size=vocab_size,
        context_len=context_len,
        notes=(note,),
    )
