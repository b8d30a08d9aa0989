"""kv_write: a step's new K and V go into one layer's pools, in place."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..errors import LayoutError
from .launch import Launcher, kernel_spec, require_metadata, require_pools

THREADS = 256

SPEC = kernel_spec(
    "kv_write",
    inputs=("key_pool", "value_pool", "keys", "values", "slots", "token"),
    outputs=("token_out",),
    inplace=("key_pool", "value_pool"),
)


def kv_write(
    launch: Launcher,
    key_pool: mx.array,
    value_pool: mx.array,
    keys: mx.array,
    values: mx.array,
    slots: mx.array,
    token: mx.array,
) -> mx.array:
    """Writes keys [T, Hkv, DK] and values [T, Hkv, DV] to `slots` (int32 [>= T], block * block_size + offset) of the
    pools [num_blocks, block_size, Hkv, width], converted to their dtype. Slots of block 0 are skipped; no other slot
    may come twice. Returns the token that the pools' next reader or writer takes. Raises LayoutError."""
    require_pools(key_pool, value_pool)
    num_tokens = keys.shape[0]
    if keys.shape[1:] != key_pool.shape[2:] or values.shape != (num_tokens, *value_pool.shape[2:]):
        raise LayoutError(f"K {keys.shape} and V {values.shape} do not fit pools {key_pool.shape}, {value_pool.shape}")
    require_metadata("slots", slots, num_tokens)
    (token_out,) = launch(
        SPEC,
        [key_pool, value_pool, keys, values, slots, token],
        template=[("T", key_pool.dtype)],
        grid=(THREADS * num_tokens, 1, 1),
        threadgroup=(THREADS, 1, 1),
        shapes=[token.shape],
        dtypes=[token.dtype],
    )
    return token_out


def kv_write_reference(pool: np.ndarray, vectors: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """What one pool holds afterwards: [num_blocks, block_size, Hkv, D] with vectors [T, Hkv, D] at `slots`."""
    written = pool.copy()
    block_size = pool.shape[1]
    for vector, slot in zip(vectors, slots, strict=False):
        if slot >= block_size:
            written[slot // block_size, slot % block_size] = vector
    return written
