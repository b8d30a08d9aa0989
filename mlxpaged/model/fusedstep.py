"""Layers of a decode graph in which one kernel rotates queries and keys and writes K and V. Owns the deferral: what a
rope left unrotated waits for the attention call; whatever does not fit goes the way of attention.py."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .attention import AttentionStep, PagedLayer
from .kernelpool import KernelPool
from .kvspec import NotPaged, probe
from .rotation import StepOffset, Unrotated, install_rotations
from .seam import KVHandle


class FusedStep(AttentionStep):
    """A step that only decodes, over kernels, of a model whose ropes are installed (rotation.py)."""

    pool: KernelPool

    def layers(self) -> list[PagedLayer]:
        """The `cache=` argument of the model: one object per layer."""
        offset = StepOffset(self.offset)
        return [FusedLayer(self, index, group, offset) for index, group in enumerate(self.pool.spec.group_of)]


class FusedLayer(PagedLayer):
    """One layer's stand-in for an mlx-lm cache, which writes unrotated keys only when queries attend to them."""

    def __init__(self, step: FusedStep, index: int, group: int, offset: StepOffset) -> None:
        super().__init__(step, index, group)
        self._pool = step.pool
        self._waiting: tuple[Unrotated, mx.array] | None = None
        self.offset = offset  # type: ignore[assignment]  # a model passes it on to its ropes

    def update_and_fetch(self, keys: Any, values: mx.array) -> tuple[KVHandle, KVHandle]:
        """As PagedLayer's, of keys that may be Unrotated."""
        if type(keys) is not Unrotated:
            return super().update_and_fetch(keys, values)
        self._waiting = keys, values
        return KVHandle(self, keys), KVHandle(self, values)

    def attend(self, queries: Any, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """As PagedLayer's, of queries that may be Unrotated."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            keys, values = waiting
            if type(queries) is Unrotated and queries.rotation is keys.rotation:
                asked = self._asked(scale, mask, sinks)
                return self._pool.decode_unrotated(self._index, self._step, queries, keys, values, asked)
            super().update_and_fetch(keys.rotated(), values)
        if type(queries) is Unrotated:
            queries = queries.rotated()
        return super().attend(queries, scale, mask, sinks)


def why_not_fused(model: nn.Module) -> str | None:
    """None where FusedStep serves the model, whose ropes are installed then; else one line that says why not. Costs
    milliseconds."""
    if not install_rotations(model):
        return "it has no rope that rope_write could stand in for"
    try:
        probe(model, StepOffset(mx.zeros((3,), mx.int32)))
    except Exception as error:  # a model raises what it likes for what is no array
        cause = error.__cause__ if isinstance(error, NotPaged) and error.__cause__ else error
        first = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        return f"it does more than rotate queries and keys by their positions ({first})"
    return None
