"""From loaded weights to something that runs plans: which path serves a model, how its KV is grouped, how much of it
fits. Called on the MLX thread; owns nothing afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ..config import EngineConfig
from ..kernels.choose import AttentionPath
from ..kernels.timing import PathChoice
from ..sched.allocator import GroupSpec
from ..sched.budget import StepBudget
from ..sched.table import blocks_for
from .activations import measured
from .attention_path import attention_path
from .check import differs_from_stock
from .compiled import Graphs
from .drawing import Draw, KernelDraw, PlainDraw
from .estimate import cut_context, groups_of, need_of, on_gpu, step_budget, wish_of
from .hostdrawing import host_draw
from .kernelpool import KernelPool
from .kvpool import KVPool
from .kvspec import KVSpec, NotPaged, probe
from .linear_ways import linear_ways
from .linears import LinearWays
from .loader import LoadedModel
from .memory import limit_mlx, machine, spare_memory
from .memplan import MemoryPlan, plan_memory, shortfall
from .plainpool import PlainPool
from .poolsize import PoolSizer
from .replay import BLOCKS, Replay, find_replay
from .runner import ModelRunner, Runner
from .sampling import Sampler
from .seam import remove_gather_norm
from .solo import SoloRunner

log = logging.getLogger(__name__)

CUDA_ROUND_CHUNKS = 512


@dataclass(frozen=True)
class Served:
    """A runner and what its scheduler must know: `groups` of KV, `num_rows` at once, tokens a step (`budget`),
    whether prefixes are shared, how many steps it runs `ahead`. `path` is "paged" or "one at a time"; `notes` are
    lines worth reading once. `resize` gives the pool another size; None: it has none."""

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
    resize: Callable[[Sequence[int]], Sequence[int]] | None = None


def serve(loaded: LoadedModel, config: EngineConfig) -> Served:
    """The runner for `loaded`: paged where the probe and the comparison with stock mlx-lm allow it, else one request
    at a time, with a note that says why."""
    served = _by_some_path(loaded, config, min(loaded.context_len, config.context_len or loaded.context_len))
    cut = cut_context(loaded.name, config.context_len, loaded.context_len)
    return replace(served, notes=(*cut, *served.notes))


def _by_some_path(loaded: LoadedModel, config: EngineConfig, context_len: int) -> Served:
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


def memory_use() -> tuple[int, int, int]:
    """Bytes that MLX holds now, held at most, and keeps for reuse."""
    return mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory()


def end_thread() -> None:
    """The calling thread uses MLX no more. Without this the interpreter may abort at its exit."""
    mx.synchronize()
    mx.clear_streams()


def _paged(loaded: LoadedModel, spec: KVSpec, config: EngineConfig, context_len: int) -> Served:
    budget, num_rows = step_budget(config), config.max_rows
    need = need_of(loaded.name, loaded.model, loaded.config, loaded.weights_bytes, loaded.context_len, spec)
    plan = plan_memory(machine(), need, wish_of(config, paged=True))
    start = _start(config, plan)
    path = attention_path(spec, config.attention, log.warning)
    sampler = Sampler(num_rows, spec.vocab_size, draw_of(path))
    linears = linear_ways(loaded.model, path, log.warning)
    groups = tuple(GroupSpec(count, window) for count, window in zip(start, spec.windows, strict=True))
    runner = ModelRunner(
        loaded.model,
        make_pool(spec, start, path),
        groups,
        sampler,
        num_rows,
        graphs=_graphs(loaded, spec, path, linears) if config.compiled else None,
        linears=linears,
    )
    if on_gpu() and config.num_blocks is None:
        plan = plan_memory(machine(), replace(need, work=measured(runner, need.work)), wish_of(config, paged=True))
    limit_mlx(plan.cache_bytes)
    ceilings = plan.most_blocks if config.num_blocks is None else (config.num_blocks,) * len(start)
    groups = tuple(
        replace(group, most_blocks=max(group.num_blocks, most)) for group, most in zip(groups, ceilings, strict=True)
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
        notes=(*((path.warning,) if path.warning else ()), *_short_of(config, plan)),
        resize=PoolSizer(runner, groups_of(spec), spare_memory),
    )


def _start(config: EngineConfig, plan: MemoryPlan) -> tuple[int, ...]:
    """Blocks each group begins with."""
    if config.num_blocks is not None:
        return (config.start_blocks or config.num_blocks,) * len(plan.start_blocks)
    return (config.start_blocks,) * len(plan.start_blocks) if config.start_blocks else plan.start_blocks


def _short_of(config: EngineConfig, plan: MemoryPlan) -> tuple[str, ...]:
    """A line for a model whose context is longer than the memory for its K/V."""
    line = shortfall(plan) if config.num_blocks is None else None
    return () if line is None else (line,)


def replay(loaded: LoadedModel, spec: KVSpec, path: AttentionPath, linears: LinearWays | None) -> Replay:
    """Whether decode steps over the kernels of `path` may be replayed as graphs, and as which."""

    def small_pool() -> KernelPool:
        pool = make_pool(spec, (BLOCKS,) * len(spec.windows), replace(path, choice=PathChoice()))
        assert isinstance(pool, KernelPool)
        return pool

    return find_replay(
        loaded.model, loaded.config, loaded.context_len, small_pool, linears, "rope_write" not in path.spared
    )


def _graphs(loaded: LoadedModel, spec: KVSpec, path: AttentionPath, linears: LinearWays | None) -> Graphs | None:
    if path.launcher is None:
        return None
    found = replay(loaded, spec, path, linears)
    if found.graphs is None:
        log.warning("each decode step of %s is built anew, which costs time: %s", loaded.name, found.why)
    return found.graphs


def make_pool(spec: KVSpec, num_blocks: Sequence[int], path: AttentionPath) -> KVPool:
    """The pool that `path` asks for."""
    if path.launcher is None:
        return PlainPool(spec, num_blocks)
    rounded = CUDA_ROUND_CHUNKS if path.device.kind == "cuda" else None
    return KernelPool(spec, num_blocks, path.launcher, path.choice.use_kernel, rounded)


def draw_of(path: AttentionPath | None) -> Draw:
    """How tokens are drawn beside `path`; None: beside no pool."""
    if path is not None and path.launcher is not None and "draw" not in path.spared:
        return KernelDraw(path.launcher)
    return PlainDraw() if on_gpu() else host_draw


def _solo(loaded: LoadedModel, config: EngineConfig, context_len: int, note: str) -> Served:
    remove_gather_norm(loaded.model)
    need = need_of(loaded.name, loaded.model, loaded.config, loaded.weights_bytes, loaded.context_len, None)
    limit_mlx(plan_memory(machine(), need, wish_of(config, paged=False)).cache_bytes)
    vocab_size = int(loaded.model(mx.zeros((1, 1), mx.int32)).shape[-1])
    runner = SoloRunner(loaded.model, Sampler(1, vocab_size, draw_of(None)))
    groups = (GroupSpec(blocks_for(context_len) + 1),)
    return Served(
        runner,
        groups,
        num_rows=1,
        budget=step_budget(config),
        share=False,
        ahead=0,
        path="one at a time",
        vocab_size=vocab_size,
        context_len=context_len,
        notes=(note,),
    )
