"""From a device and a model's weights to the way its products are computed. Owns what was measured to be faster where;
the products themselves are in linears.py."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..kernels.choose import AttentionPath
from ..kernels.products import ProductKind, why_not_skinny
from ..kernels.skinny_matmul import fits
from .linears import LinearWays, Skinny

_DENSE_ABOVE = 65
"""On an H200 (MLX 0.32.4) 32 rows times 4096 x 4096 in 4 bits take 26 us packed, 64 us unpacked."""

_LARGE = 40_000_000
"""Elements of a dense weight that cuBLAS reads faster for more than 16 rows, on an H200: 32 rows times 28672 x 4096
take it 81 us and skinny_matmul 90, times 6144 x 4096 36 and 26."""


def linear_ways(model: nn.Module, path: AttentionPath, warn: Callable[[str], None]) -> LinearWays | None:
    """How the products of `model` are computed beside `path`; None: as mlx-lm does. Our kernel is tried first; where it
    fails, `warn` gets a line."""
    if path.launcher is None or path.device.kind != "cuda":
        return None
    why = why_not_skinny(path.launcher, product_kinds(model))
    if why is not None:
        warn(f"products of few rows are left to MLX on {path.device.name}: {why}")
    return LinearWays(join=True, dense_above=_DENSE_ABOVE, skinny=None if why else Skinny(path.launcher, _on_h200))


def _on_h200(rows: int, outputs: int, width: int, bits: int) -> bool:
    return bits > 0 or rows <= 16 or outputs * width <= _LARGE


def product_kinds(model: nn.Module) -> list[ProductKind]:
    """Those of the model's products that skinny_matmul can compute, each kind once."""
    kinds = {kind for part in model.modules() if (kind := _kind(part)) is not None}
    return sorted(kinds, key=lambda kind: kind.name)


def _kind(part: nn.Module) -> ProductKind | None:
    if isinstance(part, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        dtype, bits, group_size = part["scales"].dtype, part.bits, part.group_size
        width = part["weight"].shape[-1] * 32 // bits
        if getattr(part, "mode", "affine") != "affine":
            return None
    elif isinstance(part, (nn.Linear, nn.Embedding)):
        dtype, bits, group_size, width = part["weight"].dtype, 0, 64, part["weight"].shape[-1]
    else:
        return None
    return ProductKind(_name(dtype), bits, group_size) if fits(dtype, width, bits, group_size) else None


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
