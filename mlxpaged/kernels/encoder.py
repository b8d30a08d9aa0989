"""When MLX ends a Metal command buffer. Owns the two environment variables that decide it, which must be set before mlx
is imported; never imports mlx.

MLX 0.32 ends a buffer after the operation with which it holds more than MLX_MAX_OPS_PER_BUFFER kernels, or with which
the arrays bound to it, each counted once and whole, pass MLX_MAX_MB_PER_BUFFER x 2^20 elements (elements, whatever
their size; mlx/backend/metal/device.cpp). A K/V pool counts whole although a step touches a sliver of it, so with MLX's
own limits every kernel on a large pool ends a buffer, and each end costs the GPU a pause.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

OPS_VARIABLE = "MLX_MAX_OPS_PER_BUFFER"
MB_VARIABLE = "MLX_MAX_MB_PER_BUFFER"

_LARGE_MEMORY = 32 << 30


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    """A buffer holds up to `max_ops` kernels and `max_mb` x 2^20 array elements; what goes over ends it."""

    max_ops: int
    max_mb: int


MLX_LIMITS = {"base and Pro": EncoderLimits(40, 40), "Max and Ultra": EncoderLimits(50, 50)}
"""What MLX takes by itself, by chip."""


def encoder_limits(memory_bytes: int) -> EncoderLimits:
    """Limits for a machine with that much memory.

    A buffer keeps the intermediate results of its operations alive until it is done, so only machines with room take
    more operations than MLX does. The arrays may come to a quarter of the memory at two bytes an element: more than a
    buffer's share of weights and pool together, so that the pool's size stops mattering.
    """
    max_ops = 100 if memory_bytes >= _LARGE_MEMORY else 50
    return EncoderLimits(max_ops, max(1024, (memory_bytes >> 20) // 8))


def set_encoder_limits(environ: MutableMapping[str, str], platform: str, memory_bytes: int) -> EncoderLimits | None:
    """Put the limits into `environ` (os.environ), where a person's own values stay. Returns what is in force then; None
    anywhere but on macOS (sys.platform "darwin"), where nothing is changed: on CUDA the variables end graphs of
    kernels, an H200 ran out of memory without a limit, and a pool of 60 GB cost no step anything with MLX's own."""
    if platform != "darwin":
        return None
    wanted = encoder_limits(memory_bytes)
    return EncoderLimits(
        _value(environ, OPS_VARIABLE, wanted.max_ops),
        _value(environ, MB_VARIABLE, wanted.max_mb),
    )


def _value(environ: MutableMapping[str, str], variable: str, wanted: int) -> int:
    given = environ.get(variable, "").strip()
    if not given.isdecimal():  # MLX would read it as 0: a buffer for every kernel
        environ[variable] = given = str(wanted)
    return int(given)
