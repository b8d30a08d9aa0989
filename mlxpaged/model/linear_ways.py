"""From a device and a model's weights to the way its products are computed. Owns what was measured to be faster where;
the products themselves are in linears.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..kernels.choose import AttentionPath
from ..kernels.launch import Launcher
from ..kernels.products import (
    Product,
    ProductChoice,
    ProductKind,
    Weight,
    remembered_choice,
    time_products,
    why_not_skinny,
)
from ..kernels.skinny_matmul import fits
from .linears import LinearWays, Skinny

_DENSE_ABOVE = 65
"""On an H200 (MLX 0.32.4) 32 rows times 4096 x 4096 in 4 bits take 26 us packed, 64 us unpacked."""

_MANY = 4096
"""Outputs of a dense weight from which it is cuBLAS's for more than 16 rows. On an H200 it is faster at most sizes: 32
rows times 28672 x 4096 take it 58 us and skinny_matmul 81, times 4096 x 4096 14 and 17. But each of its products costs
MLX's host more, and some of those for few outputs have MLX instantiate a graph anew at every step."""

Say = Callable[[str], None]


def linear_ways(model: nn.Module, path: AttentionPath, warn: Say) -> LinearWays | None:
    """How the products of `model` are computed beside `path`; None: as mlx-lm does. skinny_matmul is tried before it is
    used; where it fails, `warn` gets a line. On every CUDA device it serves by what an H200 does, elsewhere by what
    this machine does, which is timed once and remembered."""
    launch, device = path.launcher, path.device
    if launch is None:
        return None
    weights = products_of(model)
    left = f"products of few rows are left to MLX on {device.name}"
    if device.kind == "cuda":
        works = _works(launch, weights, left, warn)
        return LinearWays(True, _DENSE_ABOVE, Skinny(launch, _on_h200) if works else None)
    choice = remembered_choice(launch, device.name, weights, lambda: _timed(launch, weights, left, warn))
    return LinearWays(skinny=Skinny(launch, choice.faster)) if choice is not None and choice.wins else None


def _on_h200(rows: int, outputs: int, width: int, bits: int, group_size: int) -> bool:
    return bits > 0 or rows <= 16 or outputs < _MANY


def _works(launch: Launcher, weights: dict[Product, list[Weight]], left: str, warn: Say) -> bool:
    kinds = sorted({product.kind for product in weights}, key=lambda kind: kind.name)
    why = why_not_skinny(launch, kinds)
    if why is not None:
        warn(f"{left}: {why}")
    return why is None


def _timed(launch: Launcher, weights: dict[Product, list[Weight]], left: str, warn: Say) -> ProductChoice | None:
    if not _works(launch, weights, left, warn):
        return None
    try:
        return time_products(launch, weights)
    except Exception as error:  # out of memory, most likely
        warn(f"{left}: they could not be timed: {error}")
        return None


def products_of(model: nn.Module) -> dict[Product, list[Weight]]:
    """The model's products that skinny_matmul can compute, each with all of its weights."""
    found: dict[Product, list[Weight]] = defaultdict(list)
    for part in model.modules():
        if (product := _product(part)) is not None:
            names = ("weight", "scales", "biases") if product.kind.bits else ("weight",)
            found[product].append([part[name] for name in names])
    return dict(found)


def _product(part: nn.Module) -> Product | None:
    if isinstance(part, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        if getattr(part, "mode", "affine") != "affine":
            return None
        kind = ProductKind(_name(part["scales"].dtype), part.bits, part.group_size)
        width = part["weight"].shape[-1] * 32 // part.bits
    elif isinstance(part, (nn.Linear, nn.Embedding)):
        kind, width = ProductKind(_name(part["weight"].dtype)), part["weight"].shape[-1]
    else:
        return None
    takes = fits(part["scales" if kind.bits else "weight"].dtype, width, kind.bits, kind.group_size)
    return Product(kind, part["weight"].shape[0], width) if takes else None


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
