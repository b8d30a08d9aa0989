"""What a model takes, found before its weights are read. Owns the look at its shapes, of which nothing is evaluated;
the arithmetic is memplan.py's. Called on the MLX thread."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from ..config import BLOCK_SIZE, Dtype, EngineConfig
from ..errors import ModelTooLarge
from ..sched.budget import StepBudget
from .kvplan import KVGroup
from .kvspec import KVSpec, NotPaged, probe
from .loader import unread
from .memory import machine
from .memplan import MemoryPlan, Need, Wish, Work, is_fused, plan_memory, refusal
from .sources import ModelSource

CPU_STEP_BUDGET, CPU_LEAST, CPU_STEP_S = 64, 16, 1.0
"""On a CPU a step takes 64 tokens, and down to 16 where that many take longer than so many seconds: its attention over
long contexts is slow, and a reply beside it would come in jerks. No less than a second: a machine that is busy for a
while would else compute its prompts in steps so small that they take twice as long."""
_CPU_CONTEXTS = 4
"""On a CPU the pool holds so many full contexts at most, unless --memory-budget says otherwise."""


def on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def step_budget(config: EngineConfig) -> StepBudget:
    """Tokens of a step on this device."""
    if on_gpu() or config.step_budget:
        return StepBudget(config.step_budget)
    return StepBudget(target_s=CPU_STEP_S, least=CPU_LEAST, ceiling=CPU_STEP_BUDGET)


def wish_of(config: EngineConfig, paged: bool) -> Wish:
    """What `config` asks for; one request at a time where the model is not paged."""
    rows = config.max_rows if paged else 1
    return Wish(
        context_len=config.context_len,
        rows=rows,
        pool_rows=rows if on_gpu() or config.memory_budget else min(rows, _CPU_CONTEXTS),
        step_budget=step_budget(config).most,
        memory_budget=config.memory_budget,
        share=config.kv_share,
    )


def cut_context(name: str, asked: int | None, longest: int) -> tuple[str, ...]:
    """A line for a --ctx above what the model was made for, which is what it gets."""
    if asked is None or asked <= longest:
        return ()
    return (f"--ctx {asked} is more than {name} was made for; its context is {longest:,} tokens",)


def estimate(source: ModelSource, config: EngineConfig) -> tuple[MemoryPlan, bool]:
    """The plan for a model that is not loaded, and whether the paged path can serve it. Reads headers only.

    Raises what opening the model raises: ModelNotFound, UnsupportedModel.
    """
    need, paged = unread_need(source, config.dtype)
    return plan_memory(machine(), need, wish_of(config, paged)), paged


def unread_need(source: ModelSource, dtype: Dtype) -> tuple[Need, bool]:
    """What a model that is not loaded would take here, and whether the paged path can serve it; reads and raises as
    `estimate` does."""
    seen = unread(source, dtype)
    try:
        spec: KVSpec | None = probe(seen.model)
    except NotPaged:
        spec = None
    return need_of(source.name, seen.model, seen.config, seen.weights_bytes, seen.context_len, spec), spec is not None


def require_room(source: ModelSource, config: EngineConfig) -> None:
    """Raises ModelTooLarge, with the numbers, for a model that would not fit. What is loaded still counts as free: it
    is given up first."""
    plan, _ = estimate(source, config)
    if (reason := refusal(plan)) is not None:
        raise ModelTooLarge(reason)


def need_of(
    name: str, model: nn.Module, config: dict[str, Any], weights_bytes: int, context_len: int, spec: KVSpec | None
) -> Need:
    """What `model` takes. Without `spec` it is served by stock mlx-lm, and its own caches tell."""
    groups, fixed = (groups_of(spec), 0) if spec is not None else _stock_groups(model)
    return Need(name, weights_bytes, groups, _work(model, config, spec), context_len, fixed)


def groups_of(spec: KVSpec) -> tuple[KVGroup, ...]:
    """The KV groups of a probed model."""
    return tuple(
        KVGroup(spec.block_bytes(group) // BLOCK_SIZE, spec.group_of.count(group), window)
        for group, window in enumerate(spec.windows)
    )


_SHORT, _LONG = 256, 512


def _stock_groups(model: nn.Module) -> tuple[tuple[KVGroup, ...], int]:
    """What mlx-lm's own caches hold, by the shapes of two lazy forwards: what grows with the tokens, and what does
    not."""
    sizes = []
    for tokens in (_SHORT, _LONG):
        caches = make_prompt_cache(model)
        model(mx.zeros((1, tokens), mx.int32), cache=caches)
        sizes.append([int(cache.nbytes) for cache in caches])
    groups, fixed = [], 0
    for cache, short, long in zip(caches, *sizes, strict=True):
        token_bytes = (long - short) // (_LONG - _SHORT)
        fixed += max(0, short - token_bytes * _SHORT)
        if token_bytes:
            groups.append(KVGroup(token_bytes, 1, cache.max_size if type(cache) is RotatingKVCache else None))
    return tuple(groups), fixed


def _work(model: nn.Module, config: dict[str, Any], spec: KVSpec | None) -> Work:
    text = config | (config.get("text_config") or {})

    def number(*keys: str) -> int:
        return next((text[key] for key in keys if isinstance(text.get(key), int) and text[key] > 0), 0)

    hidden = number("hidden_size", "n_embd", "d_model", "dim") or 4096
    heads = number("num_attention_heads", "n_head", "num_heads") or 32
    head_width = number("head_dim") or hidden // heads
    experts = number("num_experts_per_tok", "top_k_experts") * number("moe_intermediate_size", "expert_hidden_size")
    if spec is not None:
        heads = max(layer.query_heads for layer in spec.layers)
        head_width = max(layer.k_width for layer in spec.layers)
    return Work(
        hidden=hidden,
        widest=max(number("intermediate_size", "ffn_dim", "n_inner"), experts) or 4 * hidden,
        query_heads=heads,
        head_width=head_width,
        vocab_size=spec.vocab_size if spec is not None else number("vocab_size"),
        item_bytes=_item_bytes(model),
        fused=is_fused(head_width, on_gpu()),
    )


def _item_bytes(model: nn.Module) -> int:
    """The size of one activation: that of the norms' weights."""
    sizes = [array.dtype.size for _, array in tree_flatten(model.parameters()) if array.ndim == 1]
    return max(sizes, default=4)
