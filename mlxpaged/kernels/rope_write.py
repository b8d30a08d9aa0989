"""rope_write: a step's new queries and keys are rotated by their positions, and its K and V go into one layer's pools,
in place."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from ..errors import LayoutError
from .launch import SIMD_WIDTH, Launcher, floats, kernel_spec, require_metadata, require_pools

SIMDGROUPS = 8

SPEC = kernel_spec(
    "rope_write",
    inputs=("key_pool", "value_pool", "queries", "keys", "values", "rotations", "scale", "slots", "token"),
    outputs=("rotated", "token_out"),
    headers=("simd.h",),
    inplace=("key_pool", "value_pool"),
    strided=("queries", "keys", "values"),
)


def rope_write(
    launch: Launcher,
    key_pool: mx.array,
    value_pool: mx.array,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    rotations: mx.array,
    slots: mx.array,
    token: mx.array,
    *,
    dims: int,
    traditional: bool,
    scale: float = 1.0,
) -> tuple[mx.array, mx.array]:
    """Writes keys [T, Hkv, 1, DK], rotated, and values [T, Hkv, 1, DV] to `slots` (int32 [>= T], as in kv_write) of the
    pools [num_blocks, block_size, Hkv, width]. Returns queries [T, Hq, 1, DK], of the pools' dtype, rotated and laid
    out as [T, 1, Hq, DK], and the token that the pools' next reader or writer takes. Queries, keys and values may have
    any strides; nothing else may: MLX copies no argument of this kernel.

    The first `dims` elements of a vector are rotated in pairs: (2i, 2i + 1) where `traditional`, else
    (i, i + dims / 2). rotations: float32 [>= T, DK], for each token the cosine at the place of a pair's first element,
    the sine at that of its second, and a factor at each place beyond `dims`. scale: what those `dims` elements are
    multiplied by before, and rounded to the pools' dtype. Raises LayoutError.
    """
    require_pools(key_pool, value_pool)
    num_tokens, num_heads, _, width = queries.shape
    num_kv_heads, value_width = value_pool.shape[2:]
    expected = {
        "queries": (num_tokens, num_heads, 1, key_pool.shape[3]),
        "keys": (num_tokens, num_kv_heads, 1, width),
        "values": (num_tokens, num_kv_heads, 1, value_width),
    }
    for (name, shape), array in zip(expected.items(), (queries, keys, values), strict=True):
        if array.shape != shape:
            raise LayoutError(f"{name} is {array.shape}; {shape} fits pools {key_pool.shape}, {value_pool.shape}")
    if queries.dtype != key_pool.dtype:
        raise LayoutError(f"queries is {queries.dtype}, the pools are {key_pool.dtype}")
    if rotations.dtype != mx.float32 or len(rotations) < num_tokens or rotations.shape[1:] != (width,):
        raise LayoutError(
            f"rotations is {rotations.shape} {rotations.dtype}; it must be float32 [>= {num_tokens}, {width}]"
        )
    if dims % 2 or not 0 < dims <= width:
        raise LayoutError(f"{dims} of {width} elements cannot be rotated in pairs")
    require_metadata("slots", slots, num_tokens)
    threads = SIMDGROUPS * SIMD_WIDTH
    rotated, token_out = launch(
        SPEC,
        [key_pool, value_pool, queries, keys, values, rotations, floats(scale), slots, token],
        template=[
            ("T", key_pool.dtype),
            ("DK", width),
            ("DV", value_width),
            ("DIMS", dims),
            ("TRADITIONAL", traditional),
            ("SIMDGROUPS", SIMDGROUPS),
        ],
        grid=(threads * math.ceil((num_heads + 2 * num_kv_heads) / SIMDGROUPS), num_tokens, 1),
        threadgroup=(threads, 1, 1),
        shapes=[(num_tokens, 1, num_heads, width), token.shape],
        dtypes=[queries.dtype, token.dtype],
    )
    return rotated, token_out


def rotate_reference(
    vectors: np.ndarray, rotations: np.ndarray, dims: int, traditional: bool, scale: float = 1.0
) -> np.ndarray:
    """Vectors [T, heads, D], scaled and rotated by rotations [>= T, D]; in the dtype of its arguments."""
    first, second = pairs(dims, traditional)
    turns = rotations[: len(vectors), None]
    rotated = vectors * turns  # right beyond `dims`
    a, b = scale * vectors[..., first], scale * vectors[..., second]
    cosine, sine = turns[..., first], turns[..., second]
    rotated[..., first] = a * cosine - b * sine
    rotated[..., second] = a * sine + b * cosine
    return rotated


def pairs(dims: int, traditional: bool) -> tuple[np.ndarray, np.ndarray]:
    """The places of all pairs' first elements, and of their second ones."""
    places = np.arange(dims)
    return (places[::2], places[1::2]) if traditional else (places[: dims // 2], places[dims // 2 :])
