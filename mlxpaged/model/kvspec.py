"""What a model's layers store: heads, widths, window, found by one lazy forward. Owns the description; never evaluates
an array, never changes a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ..config import BLOCK_SIZE
from .seam import KVHandle, Window, attention_hook


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one cache layer stores for a token: `heads` keys of `k_width` and values of `v_width` elements."""

    heads: int
    k_width: int
    v_width: int
    dtype: mx.Dtype
    window: int | None = None
    query_heads: int = 0
    sinks: bool = False

    @property
    def token_bytes(self) -> int:
        return self.heads * (self.k_width + self.v_width) * self.dtype.size


@dataclass(frozen=True, slots=True)
class KVSpec:
    """All layers of a model, and the KV groups they fall into: layers that keep the same tokens.

    `group_of[layer]` indexes `windows`, one entry per group: None for all tokens, w for the last w.
    """

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    windows: tuple[int | None, ...] = field(init=False)
    group_of: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        found = {layer.window for layer in self.layers}
        windows = tuple(sorted(found, key=lambda window: (window is not None, window or 0)))
        object.__setattr__(self, "windows", windows)
        object.__setattr__(self, "group_of", tuple(windows.index(layer.window) for layer in self.layers))

    def block_bytes(self, group: int) -> int:
        """Bytes that one block costs over all layers of a group."""
        members = (layer for layer, index in zip(self.layers, self.group_of, strict=True) if index == group)
        return BLOCK_SIZE * sum(layer.token_bytes for layer in members)


class NotPaged(Exception):
    """This model keeps something else than plain K and V, or does its own attention maths; the text says which."""


class _Recorder:
    """Stands in for one layer's cache during the probe and notes what the model asks of it."""

    def __init__(self, index: int, window: int | None, offset: Any) -> None:
        self.index, self.window = index, window
        self.offset = offset
        self.keys_seen: tuple[mx.array, mx.array] | None = None
        self.query_heads = 0
        self.sinks = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle]:
        if keys.ndim != 4 or keys.shape[2] != 1 or values.shape[:3] != keys.shape[:3]:
            raise NotPaged(f"layer {self.index} stores keys {keys.shape} and values {values.shape}")
        self.keys_seen = (keys, values)
        return KVHandle(self, keys), KVHandle(self, values)

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> Window | None:
        return Window.asked(return_array, window_size)

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        if mask is not None and not isinstance(mask, Window):
            raise NotPaged(f"layer {self.index} builds its own mask")
        assert self.keys_seen is not None
        self.query_heads, self.sinks = queries.shape[1], sinks is not None
        return mx.zeros((*queries.shape[:3], self.keys_seen[1].shape[3]), queries.dtype)

    def spec(self) -> LayerSpec:
        if self.keys_seen is None or not self.query_heads:
            raise NotPaged(f"layer {self.index} does not attend through scaled_dot_product_attention")
        keys, values = self.keys_seen
        return LayerSpec(
            keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, self.window, self.query_heads, self.sinks
        )


def probe(model: nn.Module, offset: Any = None) -> KVSpec:
    """The layers of `model`, from a lazy forward over three rows, at positions 0 or at what stands in for positions
    (rotation.py). Raises NotPaged with the reason when the paged path cannot serve it. Costs milliseconds; evaluates
    nothing."""
    offset = mx.zeros((3,), mx.int32) if offset is None else offset
    caches = make_prompt_cache(model)
    recorders = [_Recorder(index, _window(index, cache), offset) for index, cache in enumerate(caches)]
    try:
        with attention_hook(model):
            logits = model(mx.zeros((3, 1), mx.int32), cache=recorders)
    except (TypeError, AttributeError, ValueError, IndexError, KeyError) as error:
        raise NotPaged(f"its attention does not go through the cache interface ({error})") from error
    if logits.shape[:2] != (3, 1):
        raise NotPaged(f"its logits have shape {logits.shape}")
    return KVSpec(tuple(recorder.spec() for recorder in recorders), int(logits.shape[-1]))


def _window(index: int, cache: Any) -> int | None:
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache and not cache.keep:
        return int(cache.max_size)
    raise NotPaged(f"layer {index} keeps a {type(cache).__name__}")
