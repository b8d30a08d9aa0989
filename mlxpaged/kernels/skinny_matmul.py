"""skinny_matmul: few rows times a whole weight, dense or packed, which is read once for all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from ..errors import LayoutError
from .launch import SIMD_WIDTH, Launcher, kernel_spec

MOST_ROWS = 32
"""Of one product: more sums would not fit a thread's registers."""

SIMDGROUPS = 8

_NARROW = 4096

_PACKED = (4, 8)

SPEC = kernel_spec(
    "skinny_matmul",
    inputs=("rows", "weight", "scales", "biases"),
    outputs=("out",),
    headers=("simd.h", "chunk.h", "tiles.h", "packed.h"),
)


@dataclass(frozen=True, slots=True)
class Split:
    """How the work is split: a threadgroup takes `tiles` of 8 + 8 outputs, a simdgroup reads `spans` ahead. More tiles
    read the rows less often, and leave fewer threadgroups."""

    tiles: int
    spans: int


DENSE = (Split(tiles=1, spans=4), Split(tiles=2, spans=2))
PACKED = (Split(tiles=2, spans=1), Split(tiles=4, spans=1))
"""For weights of up to _NARROW outputs, and of more: what was faster on an H200 for 32 rows."""


def split_of(num_outputs: int, bits: int) -> Split:
    """How a product with so many outputs is split."""
    return (PACKED if bits else DENSE)[num_outputs > _NARROW]


def skinny_matmul(
    launch: Launcher,
    rows: mx.array,
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    bits: int = 0,
    group_size: int = 64,
    split: Split | None = None,
) -> mx.array:
    """rows [M, K] times the weight [N, K], transposed: [M, N]. M is at most MOST_ROWS, the dtype float16 or bfloat16.

    bits: 0 for a dense weight of the rows' dtype; else it is packed as mx.quantize packs it in its affine mode, uint32
    [N, K * bits / 32], and scales and biases are [N, K / group_size] of the rows' dtype. split: by default split_of().
    Raises LayoutError.
    """
    num_rows, width = rows.shape
    num_outputs = weight.shape[0]
    if not 1 <= num_rows <= MOST_ROWS or not fits(rows.dtype, width, bits, group_size):
        raise LayoutError(f"no kernel for rows {rows.shape} {rows.dtype}, {bits} bits in groups of {group_size}")
    packed = [array for array in (scales, biases) if array is not None]
    kinds = [(weight, mx.uint32, width * bits // 32), *((array, rows.dtype, width // group_size) for array in packed)]
    wanted = kinds if bits else [(weight, rows.dtype, width)]
    if len(packed) != (2 if bits else 0) or any(
        array.dtype != dtype or array.shape != (num_outputs, columns) for array, dtype, columns in wanted
    ):
        shapes = ", ".join(f"{array.shape} {array.dtype}" for array in (weight, *packed))
        raise LayoutError(f"a weight of {shapes} is not one of {bits or 'no'} packed bits for rows {rows.shape}")
    split = split or split_of(num_outputs, bits)
    (out,) = launch(
        SPEC,
        [rows, weight, *(packed or (rows, rows))],  # stand-ins, which the kernel does not read
        template=[
            ("T", rows.dtype),
            ("BITS", bits),
            ("GROUP_SIZE", group_size),
            ("TILES", split.tiles),
            ("ROW_TILES", row_tiles(num_rows)),
            ("SPANS", split.spans),
            ("SIMDGROUPS", SIMDGROUPS),
        ],
        grid=(SIMDGROUPS * SIMD_WIDTH * math.ceil(num_outputs / (16 * split.tiles)), 1, 1),
        threadgroup=(SIMDGROUPS * SIMD_WIDTH, 1, 1),
        shapes=[(num_rows, num_outputs)],
        dtypes=[rows.dtype],
    )
    return out


def fits(dtype: mx.Dtype, width: int, bits: int = 0, group_size: int = 64) -> bool:
    """Whether the kernel takes rows of `width` elements of that dtype and such a weight."""
    if dtype not in (mx.float16, mx.bfloat16) or (bits and bits not in _PACKED):
        return False
    held = 128 // bits if bits else 8  # elements in 16 bytes, which four lanes read at once
    return width % (4 * held) == 0 and (not bits or (group_size % held == 0 and width % group_size == 0))


def row_tiles(num_rows: int) -> int:
    """Tiles of 8 rows, a power of two, so that few variants are compiled."""
    return 1 << (math.ceil(num_rows / 8) - 1).bit_length()
