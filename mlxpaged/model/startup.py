"""What must happen before mlx is imported, in one call. Owns the order; never imports mlx."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import psutil

from ..kernels.encoder import MB_VARIABLE, EncoderLimits, set_encoder_limits
from .blas import open_system_blas


@dataclass(frozen=True, slots=True)
class Startup:
    """What MLX will find: `blas`, the system library opened on Linux; `encoder`, the limits of a command buffer on
    macOS. None: left as it was."""

    blas: str | None
    encoder: EncoderLimits | None


CUDA_SETTINGS = {"MLX_CUDA_SDPA_CACHE_SIZE": "1024", MB_VARIABLE: str(1 << 20)}
"""How many plans MLX keeps for fused attention: one takes some 50 ms to make and a few kilobytes to keep, and with its
own limit, prompts of mixed lengths push out each other's. And how many 2^20 elements end a graph of kernels: more than
there are, as MLX counts a K/V pool whole at each kernel on it; with a large one each would end a graph, whose launch
costs the host some 100 us."""


def before_mlx() -> Startup:
    """Open the system's BLAS and take CUDA_SETTINGS (Linux), set the command encoder's limits (macOS). A person's own
    values stay. Idempotent; too late, and without effect, once mlx has been imported."""
    if sys.platform == "linux":
        for name, value in CUDA_SETTINGS.items():
            os.environ.setdefault(name, value)
    return Startup(open_system_blas(), set_encoder_limits(os.environ, sys.platform, psutil.virtual_memory().total))
