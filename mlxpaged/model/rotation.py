"""Where a model's ropes meet the kernel that rotates for them. Owns the stand-ins for a step's positions and for what a
rope would have rotated, and finds out what each rope does; knows nothing of pools, layers or graphs.

While a decode graph is traced, a layer's offset is a StepOffset. A rope that is called with one leaves its input as it
is and says so (Unrotated); called with anything else it is mlx-lm's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import rope_utils

from ..kernels.rope_write import pairs, rotate_reference

_POSITIONS = (0, 1, 2, 63, 1000, 4097, 100_003)
_AGREES = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """What a rope, or several alike, does to the first `dims` elements of a vector: it multiplies them by `scale`, in
    their own dtype, and rotates them in pairs (2i, 2i + 1) where `traditional`, else (i, i + dims / 2)."""

    rope: nn.Module
    dims: int
    traditional: bool
    scale: float = 1.0

    def table(self, positions: mx.array, width: int) -> mx.array:
        """What rope_write takes as rotations of vectors of `width` elements: float32 [T, width] for positions [T],
        lazily. It is what the rope makes of the vector that is 1 / scale in the first element of each pair, 0 in the
        second and 1 beyond."""
        unit = np.ones((positions.size, 1, 1, width), np.float32)
        first, second = pairs(self.dims, self.traditional)
        unit[..., first], unit[..., second] = 1 / self.scale, 0
        # A constant in memory: of a broadcast array MLX's CUDA rope reads what lies beyond it.
        turned = self.rope(mx.array(unit), offset=positions)
        return mx.contiguous(turned.reshape(positions.size, width))  # rope_write's inputs are not made contiguous


class StepOffset:
    """Stands in for the positions of a step's tokens, int32 [T]. Strict: no arithmetic, so that a model which computes
    with positions fails while it is traced. Makes each rotation's table once."""

    __slots__ = ("_tables", "positions")

    def __init__(self, positions: mx.array) -> None:
        self.positions = positions
        self._tables: dict[tuple[Rotation, int], mx.array] = {}

    def table(self, rotation: Rotation, width: int) -> mx.array:
        """rotation.table() at the step's positions."""
        key = rotation, width
        if key not in self._tables:
            self._tables[key] = rotation.table(self.positions, width)
        return self._tables[key]


class Unrotated:
    """Stands in for queries or keys [T, heads, 1, width] that a rope was to rotate. Strict: it has a shape and a dtype,
    and no arithmetic, so that a model which touches them between rope and attention fails while it is traced."""

    __slots__ = ("array", "offset", "rope", "rotation")

    def __init__(self, array: mx.array, rope: nn.Module, rotation: Rotation, offset: StepOffset) -> None:
        self.array = array
        self.rope = rope
        self.rotation = rotation
        self.offset = offset

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> mx.Dtype:
        return self.array.dtype

    def rotated(self) -> mx.array:
        """What the rope itself makes of it."""
        return self.rope(self.array, offset=self.offset.positions)

    def table(self) -> mx.array:
        """The rotations it is due, float32 [T, width]."""
        return self.offset.table(self.rotation, self.array.shape[-1])


class _Rope:
    """What is put before a rope's own class. `_rotation` None: the kernel cannot do what this one does."""

    stock: type[nn.Module]
    _rotation: Rotation | None

    def __call__(self, x: Any, offset: Any = 0, *args: Any, **kwargs: Any) -> Any:
        if type(offset) is StepOffset:
            rotation = self._rotation
            plain = isinstance(x, mx.array) and x.ndim == 4 and x.shape[2] == 1 and not (args or kwargs)
            if rotation is not None and plain:
                return Unrotated(x, self, rotation, offset)
            offset = offset.positions
        return self.stock.__call__(self, x, offset, *args, **kwargs)


@cache
def _knowing(stock: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a rope's class that knows StepOffset."""
    return type(stock.__name__, (_Rope, stock), {"stock": stock})


def install_rotations(model: nn.Module) -> int:
    """Let the model's ropes know StepOffset, and find out what each does; how many of them the kernel can stand in for.
    The others, called with a StepOffset, rotate as ever. Idempotent."""
    alike: dict[Any, Rotation] = {}
    for part in model.modules():
        stock: Any = type(part)
        if stock is nn.RoPE or stock.__module__ == rope_utils.__name__:
            rotation, key = _found(part)
            part._rotation = rotation and alike.setdefault(key, rotation)
            part.__class__ = _knowing(stock)
    return len({id(part) for part in model.modules() if isinstance(part, _Rope) and part._rotation is not None})


def remove_rotations(model: nn.Module) -> None:
    """Undo install_rotations()."""
    for part in model.modules():
        if isinstance(part, _Rope):
            part.__class__ = part.stock
            del part._rotation


def _found(rope: nn.Module) -> tuple[Rotation | None, Any]:
    """What a rope does, by experiment, and a key that is equal for ropes that do the same. None: not what rope_write
    does, or not at positions of which each row has its own."""
    try:
        dims = int(getattr(rope, "dims", None) or rope.dim)
        rotation = Rotation(rope, dims, bool(getattr(rope, "traditional", False)))
        rng, positions = np.random.default_rng(0), mx.array(_POSITIONS, mx.int32)
        unturned = np.array(rotation.table(positions[:1], dims))
        rotation = replace(rotation, scale=float(unturned[0, 0]))
        vectors = rng.standard_normal((len(_POSITIONS), 2, 1, dims + 8), np.float32)
        table = np.array(rotation.table(positions, dims + 8))
        wanted = np.array(rope(mx.array(vectors), offset=positions))[:, :, 0]
    except Exception:  # ropes raise what they like for positions they do not take
        return None, None
    got = rotate_reference(vectors[:, :, 0], table, dims, rotation.traditional, rotation.scale)
    error = np.abs(got - wanted).max()
    if not error <= _AGREES * np.abs(wanted).max():  # so for NaN as well
        return None, None
    return rotation, (dims, rotation.traditional, rotation.scale, table.tobytes())
