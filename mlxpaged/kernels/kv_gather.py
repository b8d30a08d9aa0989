"""kv_gather: scattered K and V of one layer become contiguous runs, for prefill attention."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .launch import Launcher, kernel_spec, require_metadata, require_pools

THREADS = 256

SPEC = kernel_spec(
    "kv_gather",
    inputs=("key_pool", "value_pool", "slots", "token"),
    outputs=("keys", "values", "token_out"),
)


def kv_gather(
    launch: Launcher, key_pool: mx.array, value_pool: mx.array, slots: mx.array, num_tokens: int, token: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Reads `num_tokens` tokens of the pools [num_blocks, block_size, Hkv, width] at `slots` (int32 [>= num_tokens],
    block * block_size + offset; see run_slots). Returns keys [num_tokens, Hkv, DK], values [num_tokens, Hkv, DV] and
    the token that the pools' next reader or writer takes. Raises LayoutError."""
    require_pools(key_pool, value_pool)
    require_metadata("slots", slots, num_tokens)
    keys, values, token_out = launch(
        SPEC,
        [key_pool, value_pool, slots, token],
        template=[("T", key_pool.dtype)],
        grid=(THREADS * num_tokens, 1, 1),
        threadgroup=(THREADS, 1, 1),
        shapes=[(num_tokens, *key_pool.shape[2:]), (num_tokens, *value_pool.shape[2:]), token.shape],
        dtypes=[key_pool.dtype, value_pool.dtype, token.dtype],
    )
    return keys, values, token_out


def run_slots(table: np.ndarray, start: int, stop: int, block_size: int) -> np.ndarray:
    """Slots of positions [start, stop) of a row whose block table is `table` [width]: int32 [stop - start]."""
    positions = np.arange(start, stop)
    return (table[positions // block_size] * block_size + positions % block_size).astype(np.int32)


def kv_gather_reference(pool: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """One pool [num_blocks, block_size, Hkv, D] -> [tokens, Hkv, D]."""
    return pool.reshape(-1, *pool.shape[2:])[slots]
