"""Where unmodified mlx-lm models meet the block pool. Owns the one name that is rebound in their modules, the stand-ins
for K and V, and the wrapper of the final norm; knows nothing of steps, pools or requests.

A model calls `scaled_dot_product_attention(q, k, v, cache=..., ...)`, imported by name from mlx_lm.models.base. Each
importing module is given ours instead, which looks at the type of `k`: a KVHandle attends over the pool, anything else
goes on to mlx-lm.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

_NAME = "scaled_dot_product_attention"
_ORIGINAL = base.scaled_dot_product_attention


class Attends(Protocol):
    """A layer that can attend over what it stored."""

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array: ...


class KVHandle:
    """Stands in for a layer's K or V. Strict: it has a shape and a dtype, and no arithmetic, so that a model which
    touches K or V itself fails in the probe instead of computing nonsense."""

    __slots__ = ("dtype", "layer", "shape")

    def __init__(self, layer: Attends, like: Any) -> None:  # an array, or what stands for one
        self.layer = layer
        self.shape = like.shape
        self.dtype = like.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Window:
    """The mask a model asks for when it attends to the last `size` tokens only."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size

    @staticmethod
    def asked(return_array: bool, window_size: int | None) -> Window | None:
        """The answer to make_mask(): None for plain causal attention. TypeError where a dense array is demanded."""
        if return_array:
            raise TypeError("it asks for a dense mask")
        return Window(int(window_size)) if window_size else None


def _attention(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
) -> mx.array:
    if type(keys) is KVHandle:
        return keys.layer.attend(queries, scale, mask, sinks)
    return _ORIGINAL(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def _modules(model: nn.Module) -> list[Any]:
    """The modules whose code the model runs: those that define the classes of its parts, and mlx_lm's own."""
    names = {type(part).__module__ for part in model.modules()}
    names |= {name for name in sys.modules if name.startswith("mlx_lm.models.")}
    return [module for name in sorted(names) if (module := sys.modules.get(name)) is not None and module is not base]


def install_attention(model: nn.Module) -> int:
    """Rebind the attention function wherever it still is mlx-lm's; how many modules use ours now. Idempotent."""
    count = 0
    for module in _modules(model):
        if getattr(module, _NAME, None) is _ORIGINAL:
            setattr(module, _NAME, _attention)
        count += getattr(module, _NAME, None) is _attention
    return count


def remove_attention() -> None:
    """Give every module mlx-lm's own function back."""
    for module in list(sys.modules.values()):
        if getattr(module, _NAME, None) is _attention:
            setattr(module, _NAME, _ORIGINAL)


@contextmanager
def attention_hook(model: nn.Module) -> Iterator[None]:
    """install_attention() for a while; what another model has installed stays."""
    before = {id(module) for module in _modules(model) if getattr(module, _NAME, None) is _attention}
    install_attention(model)
    try:
        yield
    finally:
        for module in _modules(model):
            if getattr(module, _NAME, None) is _attention and id(module) not in before:
                setattr(module, _NAME, _ORIGINAL)


class GatherNorm(nn.Module):
    """A model's final norm that lets only wanted rows through, so that the head computes no logits nobody reads.

    All rows pass, except while picking().
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self._rows: slice | mx.array | None = None

    @contextmanager
    def picking(self, rows: slice | mx.array) -> Iterator[None]:
        """While a graph is built, only `rows` pass."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def __call__(self, hidden: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if self._rows is not None:
            hidden = hidden[self._rows]
        return self.norm(hidden, *args, **kwargs)


_FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "norm_f", "final_norm")


def install_gather_norm(model: nn.Module) -> GatherNorm | None:
    """Wrap the final norm. None where the model has none by a known name: its logits are picked after the head."""
    inner: Any = model
    for name in ("language_model", "model", "transformer", "backbone"):
        inner = getattr(inner, name, inner)
    for name in _FINAL_NORMS:
        norm = getattr(inner, name, None)
        if isinstance(norm, GatherNorm):
            return norm
        if isinstance(norm, nn.Module):
            gather = GatherNorm(norm)
            setattr(inner, name, gather)
            return gather
    return None


def remove_gather_norm(model: nn.Module) -> None:
    """Undo install_gather_norm()."""
    for part in model.modules():
        for name in _FINAL_NORMS:
            norm = part.get(name)
            if isinstance(norm, GatherNorm):
                setattr(part, name, norm.norm)
