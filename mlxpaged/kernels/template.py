"""What a model needs of the kernels. Owns the description that self-test, timing and their records share; knows no
arrays."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ..config import BLOCK_SIZE

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
TOLERANCES = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest error a kernel may make, relative to the largest value of the float64 reference."""


@dataclass(frozen=True, slots=True)
class KernelTemplate:
    """One kind of attention layer, `layers` of which a model has: `dtype` of K, V and queries, `group` query heads to
    each of `num_kv_heads`, keys and values of `key_width` and `value_width` elements."""

    dtype: str
    num_kv_heads: int
    group: int
    key_width: int
    value_width: int
    window: int | None = None
    sinks: bool = False
    layers: int = 1

    @property
    def name(self) -> str:
        """As in "bfloat16 8x4 heads 128/128 window 1024 sinks"."""
        parts = [f"{self.dtype} {self.num_kv_heads}x{self.group} heads {self.key_width}/{self.value_width}"]
        return " ".join([*parts, *[f"window {self.window}"] * bool(self.window), *["sinks"] * self.sinks])

    @property
    def unsupported(self) -> str | None:
        """Why the kernels cannot serve such layers; None when they can."""
        if self.dtype not in DTYPES:
            return f"the kernels take {', '.join(DTYPES)}, not {self.dtype}"
        for width in (self.key_width, self.value_width):
            if width % 8 or not 8 <= width <= 256:
                return f"the kernels take widths that are multiples of 8 up to 256, not {width}"
        return None

    def pool_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a layer's K and V pool."""
        shape = (num_blocks, BLOCK_SIZE, self.num_kv_heads)
        return (*shape, self.key_width), (*shape, self.value_width)
