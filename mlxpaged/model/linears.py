"""How a model's linears are computed. Owns the classes that take the place of mlx-lm's and what is known of each
backend's products; changes no result beyond rounding, knows nothing of steps or pools.

A small model's step is bound by its host: MLX spends some 20 microseconds on starting one product on CUDA and about one
on every other node of the graph. So linears see one matrix, their weights are transposed once, and linears that are
given the same input are computed as one, and where our own kernel multiplies few rows faster, it does.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels.launch import Launcher
from ..kernels.skinny_matmul import MOST_ROWS, fits, skinny_matmul

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears of one module that models give the same input, by the names that mlx-lm's models use."""


@dataclass(frozen=True, slots=True)
class Skinny:
    """Products of 2 to MOST_ROWS rows by skinny_matmul, started by `launch`, where `faster` says so: it is asked with
    (rows, outputs, width, bits, group_size), both 0 of a dense weight. A single row is left to MLX's matrix-vector
    product."""

    launch: Launcher
    faster: Callable[[int, int, int, int, int], bool] = lambda *size: True

    def __call__(self, layer: Any, rows: mx.array) -> mx.array | None:
        """rows [T, K] times the layer's weight [N, K], without a bias; None where MLX is to compute it."""
        num_rows, width = rows.shape
        weight, bits, group_size = layer["weight"], getattr(layer, "bits", 0), getattr(layer, "group_size", 0)
        if not 1 < num_rows <= MOST_ROWS or not self.faster(num_rows, len(weight), width, bits, group_size):
            return None
        packed = [array for name in ("scales", "biases") if (array := layer.get(name)) is not None]
        if len(packed) != (2 if bits else 0) or getattr(layer, "mode", "affine") != "affine":
            return None
        if not fits(rows.dtype, width, bits, group_size) or any(x.dtype != rows.dtype for x in packed or [weight]):
            return None
        return skinny_matmul(self.launch, rows, weight, *packed, bits=bits, group_size=group_size or 64)


@dataclass(frozen=True, slots=True)
class LinearWays:
    """What is faster on a device. join: linears given the same input become one product. dense_above: from so many rows
    on, packed weights are unpacked for a dense product (None: never). skinny: the way of few rows (None: MLX's)."""

    join: bool = False
    dense_above: int | None = None
    skinny: Skinny | None = None


class FlatLinear(nn.Linear):
    """A linear that always sees one matrix [T, K]."""

    def __call__(self, x: mx.array) -> mx.array:
        return as_before(self.product(as_rows(x)), x)

    def product(self, rows: mx.array) -> mx.array:
        """rows [T, K] -> [T, N]."""
        few = _few_rows(self, rows)
        if few is not None:
            return few + self["bias"] if "bias" in self else few
        return mx.addmm(self["bias"], rows, self._transposed) if "bias" in self else rows @ self._transposed


class FlatEmbedding(nn.Embedding):
    """The same for a tied head."""

    def as_linear(self, x: mx.array) -> mx.array:
        rows = as_rows(x)
        few = _few_rows(self, rows)
        return as_before(rows @ self._transposed if few is None else few, x)


class FlatQuantizedLinear(nn.QuantizedLinear):
    """The same for packed weights. On CUDA a product over (T, 1, K) runs as T products, 13 times slower at T = 128 on
    an 8b layer than over T rows."""

    def __call__(self, x: mx.array) -> mx.array:
        return as_before(self.product(as_rows(x)), x)

    def product(self, rows: mx.array) -> mx.array:
        """rows [T, K] -> [T, N]."""
        out = _packed_product(self, rows)
        return out + self["bias"] if "bias" in self else out


class FlatQuantizedEmbedding(nn.QuantizedEmbedding):
    """The same for a tied head of packed weights."""

    def as_linear(self, x: mx.array) -> mx.array:
        return as_before(_packed_product(self, as_rows(x)), x)


class _JoinedLinear(FlatLinear):
    """One of several linears that are computed together."""

    def __call__(self, x: mx.array) -> mx.array:
        return self._siblings.output(self, x)


class _JoinedQuantizedLinear(FlatQuantizedLinear):
    """The same for packed weights."""

    def __call__(self, x: mx.array) -> mx.array:
        return self._siblings.output(self, x)


class _Siblings:
    """Linears of one input: the first that is called computes all, the others find their share. The rows of the joined
    weight are the linears' own, who keep views of it, so that nothing is held twice."""

    def __init__(self, parts: Sequence[Any]) -> None:
        ends = list(itertools.accumulate(len(part["weight"]) for part in parts))
        self.whole = copy.copy(parts[0])
        self._ends = ends[:-1]
        self._input: mx.array | None = None
        self._outputs: dict[int, mx.array] = {}
        for name in [name for name in ("weight", "scales", "biases", "bias") if name in parts[0]]:
            self.whole[name] = mx.concatenate([part[name] for part in parts])
            views = mx.split(self.whole[name], self._ends)
            mx.eval(self.whole[name], views)
            for part, view in zip(parts, views, strict=True):
                part[name] = view
        _prepare(self.whole)

    def output(self, part: Any, x: mx.array) -> mx.array:
        """What `part` gives for `x`."""
        place = part._place
        if self._input is not x or place not in self._outputs:
            self._input = x
            self._outputs = dict(enumerate(mx.split(self.whole.product(as_rows(x)), self._ends, axis=-1)))
        out = self._outputs.pop(place)
        if not self._outputs:
            self._input = None
        return as_before(out, x)


_FLAT: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FlatLinear,
    nn.Embedding: FlatEmbedding,
    nn.QuantizedLinear: FlatQuantizedLinear,
    nn.QuantizedEmbedding: FlatQuantizedEmbedding,
}
_JOINED: dict[type[nn.Module], type[nn.Module]] = {
    FlatLinear: _JoinedLinear,
    FlatQuantizedLinear: _JoinedQuantizedLinear,
}


_OURS = {*_FLAT.values(), *_JOINED.values()}


def flatten_linears(model: nn.Module, ways: LinearWays | None = None) -> None:
    """Make every linear of the model one of ours, computed by `ways`. The weights must stay what they are afterwards.
    Idempotent; a model whose linears were joined stays so."""
    modules = model.modules()
    for part in modules:
        if type(part) in _FLAT:
            part.__class__ = _FLAT[type(part)]
            _prepare(part)
        if ways is not None and type(part) in _OURS:
            part._ways = ways
            if ways.skinny is not None:
                _lay_out(part)
            if hasattr(part, "_siblings"):
                part._siblings.whole._ways = ways
    if ways is not None and ways.join:
        for module in modules:
            for names in SIBLINGS:
                _join([module.get(name) for name in names])


def _prepare(part: Any) -> None:
    if isinstance(part, (FlatLinear, FlatEmbedding)):
        part._transposed = part["weight"].T  # a view; no parameter, by the underscore
        mx.eval(part._transposed)
    if not hasattr(part, "_ways"):
        part._ways = LinearWays()


def _lay_out(part: Any) -> None:
    """Row after row, as our kernel reads weights: one that a model transposes as it loads would be copied for each
    product."""
    for name in [name for name in ("weight", "scales", "biases") if name in part]:
        part[name] = mx.contiguous(part[name])  # no copy of what is so already
        mx.eval(part[name])
    _prepare(part)


def _join(parts: Sequence[Any]) -> None:
    """Compute `parts` together, where all of them are linears of one kind, one input width and one dtype."""
    kinds = {_kind(part) for part in parts}
    if len(kinds) != 1 or None in kinds:
        return
    siblings = _Siblings(parts)
    mx.clear_cache()  # the weights as they were: nothing else will ever fit there
    for place, part in enumerate(parts):
        part.__class__ = _JOINED[type(part)]
        _prepare(part)
        part._siblings, part._place = siblings, place


def _kind(part: Any) -> tuple[Any, ...] | None:
    """What must be equal for linears to be joined; None: no linear that can be."""
    if type(part) not in _JOINED:
        return None
    packing = (part.group_size, part.bits, part.mode) if type(part) is FlatQuantizedLinear else ()
    arrays = [(name, part[name].shape[1:], part[name].dtype) for name in sorted(part) if not name.startswith("_")]
    return (type(part), *packing, *arrays)


def as_rows(x: mx.array) -> mx.array:
    """[..., K] -> [T, K]."""
    return x.reshape(-1, x.shape[-1])


def as_before(out: mx.array, x: mx.array) -> mx.array:
    """[T, N] -> [..., N], the leading axes those of `x`."""
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _packed_product(layer: Any, rows: mx.array) -> mx.array:
    """rows [T, K] times the packed weight [N, K], without a bias."""
    few = _few_rows(layer, rows)
    if few is not None:
        return few
    ways: LinearWays = layer._ways
    packed = (layer["weight"], layer["scales"], layer.get("biases"))
    packing = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    if ways.dense_above is not None and len(rows) >= ways.dense_above:
        return rows @ mx.dequantize(*packed, **packing).astype(rows.dtype).T
    return mx.quantized_matmul(rows, *packed, transpose=True, **packing)


def _few_rows(layer: Any, rows: mx.array) -> mx.array | None:
    """rows [T, K] times the layer's weight by our kernel, without a bias; None where MLX is to compute it."""
    skinny: Skinny | None = layer._ways.skinny
    return None if skinny is None else skinny(layer, rows)
