"""paged_decode: attention of a few query positions per row over K/V scattered in blocks, and the merge of its
partitions."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from ..errors import LayoutError
from .launch import SIMD_WIDTH, Launcher, floats, kernel_spec, require_metadata, require_pools
from .partitions import num_partitions

MAX_HEADS = 8
"""Query vectors that share one read of K and V: more would not fit a thread's registers."""

SIMDGROUPS = 8

LOG2_E = math.log2(math.e)

SPEC = kernel_spec(
    "paged_decode",
    inputs=("queries", "key_pool", "value_pool", "tables", "context_lens", "sinks", "factors", "token"),
    outputs=("out", "lse", "token_out"),
    headers=("simd.h", "chunk.h", "softmax.h"),
)
REDUCE_SPEC = kernel_spec("paged_decode_reduce", inputs=("parts", "lse"), outputs=("out",), headers=("simd.h",))


def paged_decode(
    launch: Launcher,
    queries: mx.array,
    key_pool: mx.array,
    value_pool: mx.array,
    tables: mx.array,
    context_lens: mx.array,
    token: mx.array,
    *,
    max_context: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    partitions: int | None = None,
    heads_first: bool = False,
) -> tuple[mx.array, mx.array]:
    """Attention of queries [R, Q, Hq, DK] over the pools [num_blocks, block_size, Hkv, width], each row's queries at
    its last Q positions: out [R, Q, Hq, DV] and the token that the pools' next writer takes.

    tables: int32 [>= R, width], entry i the block of positions [i * block_size, (i + 1) * block_size), 0 if released.
    context_lens: int32 [>= R], positions that count, the queries' own included; a row of 0 gives zeros, and so does a
    query before position 0. max_context: no context_len is larger. window: a query sees that many positions up to its
    own. softcap: scores become softcap * tanh(score / softcap). sinks: [Hq], a logit per query head that takes weight
    and gives no value. partitions: each row is divided into so many (None: as num_partitions() says). heads_first: out
    is [R, Hq, Q, DV], which for one position is the same memory. Raises LayoutError.
    """
    require_pools(key_pool, value_pool)
    num_rows, num_positions, num_heads, key_width = queries.shape
    _, block_size, num_kv_heads, value_width = value_pool.shape
    group = num_heads // num_kv_heads
    if key_width != key_pool.shape[3] or group * num_kv_heads != num_heads or queries.dtype != key_pool.dtype:
        raise LayoutError(f"queries {queries.shape} {queries.dtype} do not fit {key_pool.shape} {key_pool.dtype}")
    require_metadata("tables", tables, num_rows)
    require_metadata("context_lens", context_lens, num_rows)
    if max_context > tables.shape[1] * block_size:
        raise LayoutError(
            f"max_context is {max_context}; a table of {tables.shape} holds {tables.shape[1] * block_size}"
        )
    if sinks is not None and sinks.size != num_heads:
        raise LayoutError(f"sinks is {sinks.shape}; there are {num_heads} query heads")

    if heads_first and num_positions > 1:
        raise LayoutError(f"heads come first for one position, not for {num_positions}")

    # Shaped as they are wanted: a view costs a small model's host a microsecond a layer.
    num_vectors = num_rows * num_positions * num_heads
    shape = (num_rows, num_heads, 1, value_width) if heads_first else (*queries.shape[:3], value_width)
    passes = math.ceil(num_positions * group / MAX_HEADS)
    if partitions is None:
        seen = max_context if window is None else min(max_context, window + num_positions - 1)
        partitions = num_partitions(num_rows, num_kv_heads * passes, seen)
    out, lse, token_out = launch(
        SPEC,
        [
            queries,
            key_pool,
            value_pool,
            tables,
            context_lens,
            context_lens if sinks is None else sinks,  # a stand-in, which the kernel does not read
            floats(scale / softcap, softcap * LOG2_E) if softcap else floats(scale * LOG2_E),
            token,
        ],
        template=[
            ("T", key_pool.dtype),
            ("O", queries.dtype if partitions == 1 else mx.float32),
            ("DK", key_width),
            ("DV", value_width),
            ("G", group),
            ("Q", num_positions),
            ("HEADS", math.ceil(num_positions * group / passes)),
            ("BLOCK_SIZE", block_size),
            ("WINDOW", window or 0),
            ("SIMDGROUPS", SIMDGROUPS),
            ("SINKS", sinks is not None),
            ("SOFTCAP", bool(softcap)),
        ],
        grid=(SIMDGROUPS * SIMD_WIDTH * num_kv_heads * passes, num_rows, partitions),
        threadgroup=(SIMDGROUPS * SIMD_WIDTH, 1, 1),
        shapes=[
            shape if partitions == 1 else (num_vectors, partitions, value_width),
            (num_vectors, partitions),
            token.shape,
        ],
        dtypes=[queries.dtype if partitions == 1 else mx.float32, mx.float32, token.dtype],
    )
    if partitions > 1:
        out = paged_decode_reduce(launch, out, lse, queries.dtype, shape)
    return out, token_out


def paged_decode_reduce(
    launch: Launcher, parts: mx.array, lse: mx.array, dtype: mx.Dtype, shape: tuple[int, ...]
) -> mx.array:
    """Merges float32 parts [vectors, partitions, DV] by their log2-sum-exp, lse [vectors, partitions], into `dtype` and
    `shape` [..., DV]. One kernel for every number of partitions: none is compiled while a context grows."""
    num_vectors, _, width = parts.shape
    (out,) = launch(
        REDUCE_SPEC,
        [parts, lse],
        template=[("O", dtype), ("DV", width), ("SIMDGROUPS", SIMDGROUPS)],
        grid=(SIMDGROUPS * SIMD_WIDTH * num_vectors, 1, 1),
        threadgroup=(SIMDGROUPS * SIMD_WIDTH, 1, 1),
        shapes=[shape],
        dtypes=[dtype],
    )
    return out


def paged_decode_reference(
    queries: np.ndarray,
    key_pool: np.ndarray,
    value_pool: np.ndarray,
    tables: np.ndarray,
    context_lens: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """The same attention by its definition, one query vector at a time, in the dtype of its arguments (float64)."""
    num_rows, num_positions, num_heads, _ = queries.shape
    _, block_size, num_kv_heads, value_width = value_pool.shape
    out = np.zeros((num_rows, num_positions, num_heads, value_width))
    for row, i, head in np.ndindex(num_rows, num_positions, num_heads):
        last = int(context_lens[row]) - num_positions + i
        seen = np.arange(max(0, last + 1 - window) if window else 0, last + 1)
        if len(seen) == 0 and sinks is None:
            continue
        blocks, offsets, kv_head = tables[row, seen // block_size], seen % block_size, head * num_kv_heads // num_heads
        scores = key_pool[blocks, offsets, kv_head] @ queries[row, i, head] * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        logits = scores if sinks is None else np.append(scores, sinks[head])
        weights = np.exp(logits - logits.max())
        out[row, i, head] = weights[: len(seen)] @ value_pool[blocks, offsets, kv_head] / weights.sum()
    return out
