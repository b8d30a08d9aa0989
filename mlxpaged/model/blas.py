"""The system's OpenBLAS on Linux. Owns the one call that must come before `mlx.core` is imported; never imports it.

MLX's Linux build bundles a reference BLAS. A library opened earlier with RTLD_GLOBAL wins symbol look-up, and
OpenBLAS is about ten times faster at float32 matrix products; no re-exec and no LD_PRELOAD is needed.
"""

from __future__ import annotations

import ctypes
import os
import sys

SWITCH = "MLXPAGED_BLAS"
HINT = "OpenBLAS was not found: float32 runs about ten times slower; `apt install libopenblas0-pthread` cures it"
_NAMES = ("libopenblas.so.0", "libopenblasp.so.0")


def open_system_blas() -> str | None:
    """Open the system's OpenBLAS for every library loaded later; idempotent.

    Returns the name it was found by, or None where it is absent, refused by MLXPAGED_BLAS=off, or not Linux.
    """
    if sys.platform != "linux" or os.environ.get(SWITCH, "").lower() == "off":
        return None
    for name in _NAMES:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    return None


def blas_hint(opened: str | None) -> str | None:
    """One line for a person on Linux without OpenBLAS; None where there is nothing to say."""
    if opened or sys.platform != "linux" or os.environ.get(SWITCH, "").lower() == "off":
        return None
    return HINT
