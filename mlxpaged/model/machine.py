"""What this machine and its MLX are, as findings a person can read. Owns looking; changes nothing and loads no model.
Importing this imports mlx.core; call `startup.before_mlx` before."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import mlx.core as mx
import psutil

from .. import __version__
from ..kernels.encoder import MLX_LIMITS
from .blas import blas_hint
from .finding import Finding
from .memory import free_memory
from .startup import Startup

TESTED = {"mlx": ((0, 32, 4), (0, 34)), "mlx-lm": ((0, 32, 2), (0, 34))}
"""From the first version of each pair up to, and without, the second."""

_BACKENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")


def machine_findings(startup: Startup) -> list[Finding]:
    """System, versions, memory and what was set before mlx was imported."""
    return [system(), *versions(), compute(), memory(), *gpu_memory(), blas(startup), encoder(startup)]


def system() -> Finding:
    name = f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else f"{platform.system()} {platform.release()}"
    value = f"{name} {platform.machine()}, {_chip()}, {os.cpu_count()} cores"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return Finding("system", value, "MLX needs an Apple silicon Mac and an arm64 Python", problem=True)
    return Finding("system", value)


def versions() -> list[Finding]:
    ours = Finding("mlxpaged", f"{__version__} on Python {platform.python_version()}")
    backends = [name for name in _BACKENDS if _installed(name)]
    if len(backends) < 2:
        return [ours, *map(package_finding, TESTED)]
    advice = f"{' and '.join(backends)} overwrite each other's files; uninstall all but one, then reinstall that one"
    return [ours, *map(package_finding, TESTED), Finding("backends", ", ".join(backends), advice, problem=True)]


def startup_notes(startup: Startup) -> tuple[str, ...]:
    """What a person should read once when a model is loaded: untested versions, a missing BLAS."""
    notes = [
        f"{finding.name} {finding.value}: {finding.advice}"
        for finding in map(package_finding, TESTED)
        if finding.advice
    ]
    return (*notes, *filter(None, [blas(startup).advice]))


def package_finding(package: str) -> Finding:
    """Whether mlx or mlx-lm is there, in a version that was tested."""
    first, end = TESTED[package]
    installed = _installed(package)
    if installed is None:
        return Finding(package, "not installed", f"pip install '{package}>={_dotted(first)}'", problem=True)
    if first <= version_numbers(installed) < end:
        return Finding(package, installed)
    advice = f"it is untested with mlxpaged, which was tested from {_dotted(first)} up to, but without, {_dotted(end)}"
    return Finding(package, installed, advice)


def version_numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 0.33.1.dev5 is (0, 33, 1)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def compute() -> Finding:
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    kind = ("Metal" if mx.metal.is_available() else "CUDA") if on_gpu else "CPU"
    value = f"{kind}, {mx.device_info().get('device_name', 'unknown')}"
    if sys.platform == "darwin" and not on_gpu:
        return Finding("compute", value, "MLX finds no GPU: a virtual machine or a headless session has none", True)
    return Finding("compute", value)


def memory() -> Finding:
    total, free = psutil.virtual_memory().total, free_memory()
    advice = "little memory is free; close something, or lower --memory-budget" if free < 1 << 30 else None
    return Finding("memory", f"{_gib(total)} in all, {_gib(free)} free", advice)


def gpu_memory() -> list[Finding]:
    """What the GPU may hold, where MLX or the system tells."""
    found = []
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended:
        found.append(Finding("working set", f"{_gib(int(recommended))} recommended for the GPU"))
    if sys.platform == "darwin" and (limit := _sysctl("iogpu.wired_limit_mb")):
        value = "the system's default" if limit == "0" else f"{limit} MB"
        found.append(Finding("wired limit", f"{value} (sysctl iogpu.wired_limit_mb)"))
    return found


def blas(startup: Startup) -> Finding:
    if sys.platform != "linux":
        return Finding("BLAS", "the system's own")
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    hint = blas_hint(startup.blas) if on_cpu else None
    return Finding("BLAS", startup.blas or "MLX's bundled one", hint)


def encoder(startup: Startup) -> Finding:
    if startup.encoder is None:
        return Finding("encoder limits", "MLX's own (they are set on macOS only)")
    ours, own = startup.encoder, ", ".join(f"{one.max_ops}/{one.max_mb} on {chip}" for chip, one in MLX_LIMITS.items())
    value = f"{ours.max_ops} kernels or {ours.max_mb} x 2^20 elements a command buffer (MLX's own: {own})"
    return Finding("encoder limits", value)


def _chip() -> str:
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or "unknown chip"
    return str(mx.device_info(mx.Device(mx.cpu)).get("device_name", "unknown processor"))


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
