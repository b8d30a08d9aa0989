"""What must happen before mlx is imported, in one call. Owns the order; never imports mlx."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import psutil

from ..kernels.encoder import EncoderLimits, set_encoder_limits
from .blas import open_system_blas


@dataclass(frozen=True, slots=True)
class Startup:
    """What MLX will find: `blas`, the system library opened on Linux; `encoder`, the limits of a command buffer on
    macOS. None: left as it was."""

    blas: str | None
    encoder: EncoderLimits | None


ATTENTION_PLANS = "MLX_CUDA_SDPA_CACHE_SIZE"
"""How many plans MLX keeps for fused attention on CUDA. One takes some 50 ms to make and a few kilobytes to keep; with
MLX's own limit, prompts of mixed lengths push out each other's."""


def before_mlx() -> Startup:
    """Open the system's BLAS and keep more attention plans (Linux), set the command encoder's limits (macOS). A
    person's own values stay. Idempotent; too late, and without effect, once mlx has been imported."""
    if sys.platform == "linux":
        os.environ.setdefault(ATTENTION_PLANS, "1024")
    return Startup(open_system_blas(), set_encoder_limits(os.environ, sys.platform, psutil.virtual_memory().total))
