"""Figures about the kernels on this device, for a report. Owns measuring; judges nothing and keeps nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from ..config import BLOCK_SIZE
from .kv_write import kv_write
from .launch import Launcher, new_token, padded
from .selftest_cases import order_error
from .template import DTYPES, KernelTemplate
from .timing import prepare, time_paths

_ORDER_KERNELS = 480
_READ_BYTES = 256 << 20
_STEPS = 32


def order_with_and_without_tokens(launch: Launcher, template: KernelTemplate) -> dict[str, Any]:
    """Largest error of reads after writes in one lazy graph, ordered by tokens and not ordered at all."""
    return {
        name: order_error(launch, template, np.random.default_rng(0), _ORDER_KERNELS, chained=chained)
        for name, chained in (("error_with_tokens", True), ("error_without_tokens", False))
    }


def write_times(launch: Launcher, template: KernelTemplate, pool_tokens: int) -> dict[str, Any]:
    """Microseconds of one token's write into a pool of `pool_tokens` tokens while the last write is in flight: by
    kv_write, whose time must not grow with the pool, and by MLX's own indexed write, which may copy the pool."""
    keys, values = (
        mx.zeros(shape, DTYPES[template.dtype]) for shape in template.pool_shapes(pool_tokens // BLOCK_SIZE)
    )
    new = mx.ones((1, *keys.shape[2:]), keys.dtype), mx.ones((1, *values.shape[2:]), values.dtype)
    slots = padded(np.array([BLOCK_SIZE]))
    mx.eval(keys, values, new, slots)

    def in_place() -> None:
        token = new_token()
        for _ in range(_STEPS):
            token = kv_write(launch, keys, values, *new, slots, token)
            mx.async_eval(token)
        mx.eval(token)

    def functional() -> None:
        pools = [keys.reshape(-1, *keys.shape[2:]), values.reshape(-1, *values.shape[2:])]
        for _ in range(_STEPS):
            for pool, one in zip(pools, new, strict=True):
                pool[slots[:1]] = one
            mx.async_eval(pools)
        mx.eval(pools)

    return {
        "pool_tokens": pool_tokens,
        "kv_write_us": best_s(in_place) / _STEPS * 1e6,
        "mlx_write_us": best_s(functional) / _STEPS * 1e6,
    }


def first_launches(launch: Launcher, template: KernelTemplate) -> dict[str, Any]:
    """Milliseconds of the first call of a variant, which compiles it, and of the next. `template` must be one that
    nothing has asked for yet."""
    ways = prepare(launch, template, 1, 128)
    assert ways is not None
    calls = {"paged_decode": ways.kernel, "kv_gather": ways.gather}
    return {f"{name}_ms": [round(_seconds(call) * 1e3, 2) for _ in range(2)] for name, call in calls.items()}


def decode_rates(launch: Launcher, template: KernelTemplate, budget_s: float) -> list[dict[str, Any]]:
    """Both ways of decoding by size: microseconds a layer, the kernel's GB/s, and its share of a streaming read."""
    read = streaming_read()
    choice = time_paths(
        lambda rows, context: prepare(launch, template, rows, context),
        budget_s=budget_s,
        rows=(8, 1, 32, 64),
        contexts=(1024, 512, 4096, 32768),
    )
    figures = []
    for size in sorted(choice.times, key=lambda size: (size.rows, size.context)):
        seen = min(size.context, template.window or size.context)
        elements = size.rows * seen * template.num_kv_heads * (template.key_width + template.value_width)
        rate = elements * DTYPES[template.dtype].size / size.kernel_s
        figures.append(
            {
                "rows": size.rows,
                "context": size.context,
                "paged_decode_us": round(size.kernel_s * 1e6, 1),
                "gather_us": round(size.gather_s * 1e6, 1),
                "GB/s": round(rate / 1e9, 1),
                "of_streaming_read": round(rate / read, 3),
            }
        )
    return figures


def streaming_read() -> float:
    """Bytes a second at which MLX reads a large array once."""
    data = mx.zeros((_READ_BYTES // 4,), mx.float32)
    mx.eval(data)
    return _READ_BYTES / best_s(lambda: mx.eval(mx.max(data)))


def best_s(call: Callable[[], None], repeats: int = 3) -> float:
    """Seconds of the quickest of `repeats` calls, after one that is not measured."""
    call()
    return min(_seconds(call) for _ in range(repeats))


def _seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return max(time.perf_counter() - started, math.ulp(1.0))
