"""How much memory this process may still take, and the limits MLX is given. Owns reading it from the system, its
container and the device; plans nothing."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import mlx.core as mx
import psutil

from .memplan import Machine

_CGROUP = Path("/sys/fs/cgroup")
_WARNING = 2
"""macOS: kern.memorystatus_vm_pressure_level is 1 when all is well, 2 as a warning, 4 when it is critical."""


def free_memory() -> int:
    """Bytes that can be taken without swapping, within the container's limit where there is one."""
    free = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))


def machine() -> Machine:
    """The device's memory as a plan sees it: what MLX holds now counts as free, for whoever plans decides about it."""
    info = mx.device_info() if mx.default_device().type == mx.DeviceType.gpu else {}
    held = mx.get_active_memory() + mx.get_cache_memory()
    if "free_memory" in info:  # CUDA: memory of its own
        return Machine(int(info["total_memory"]), int(info["free_memory"]) + held)
    working_set = info.get("max_recommended_working_set_size")
    return Machine(
        psutil.virtual_memory().total, free_memory() + held, int(working_set) if working_set is not None else None
    )


def spare_memory() -> int:
    """Bytes that a pool may take now, beside what MLX uses already."""
    return min(machine().limits(None).values()) - mx.get_active_memory()


def pressed() -> bool:
    """Whether the system wants memory back: macOS says so itself; elsewhere, less than half of what we leave to others
    is free."""
    level = _pressure_level()
    if level is not None:
        return level >= _WARNING
    now = machine()
    return now.free - mx.get_active_memory() - mx.get_cache_memory() < now.reserve // 2


def _pressure_level() -> int | None:
    if sys.platform != "darwin":
        return None
    level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    name = b"kern.memorystatus_vm_pressure_level"
    failed = ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else level.value


def limit_mlx(cache_bytes: int) -> None:
    """Cap what MLX keeps for reuse, and on a Mac keep what it uses resident up to the recommended working set."""
    mx.set_cache_limit(cache_bytes)
    if mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))


def release_memory() -> None:
    """Give what MLX keeps for reuse back to the system."""
    mx.clear_cache()


def unwire() -> None:
    """No model is resident: nothing has to stay in memory."""
    mx.clear_cache()
    if mx.metal.is_available():
        mx.set_wired_limit(0)
