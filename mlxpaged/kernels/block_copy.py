"""block_copy: copy on write. The first slots of some blocks go to other blocks of one layer's pools, in place."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..errors import LayoutError
from .launch import Launcher, kernel_spec, require_metadata, require_pools

THREADS = 256

SPEC = kernel_spec(
    "block_copy",
    inputs=("key_pool", "value_pool", "copies", "token"),
    outputs=("token_out",),
    inplace=("key_pool", "value_pool"),
)


def block_copy(
    launch: Launcher, key_pool: mx.array, value_pool: mx.array, copies: mx.array, token: mx.array
) -> mx.array:
    """Copies slots within the pools [num_blocks, block_size, Hkv, width]. `copies`, int32 [>= 3, 3], holds
    (source, destination, slots); destination 0 is skipped, and no block may be both a source and a destination. Returns
    the token that the pools' next reader or writer takes. Raises LayoutError."""
    require_pools(key_pool, value_pool)
    require_metadata("copies", copies, 1)
    if copies.ndim != 2 or copies.shape[1] != 3:
        raise LayoutError(f"copies is {copies.shape}; it must be [copies, 3]: source, destination, slots")
    (token_out,) = launch(
        SPEC,
        [key_pool, value_pool, copies, token],
        template=[("T", key_pool.dtype)],
        grid=(THREADS * key_pool.shape[1], copies.shape[0], 1),
        threadgroup=(THREADS, 1, 1),
        shapes=[token.shape],
        dtypes=[token.dtype],
    )
    return token_out


def block_copy_reference(pool: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """What one pool [num_blocks, block_size, Hkv, D] holds afterwards."""
    copied = pool.copy()
    for source, destination, slots in copies:
        if destination != 0:
            copied[destination, :slots] = pool[source, :slots]
    return copied
