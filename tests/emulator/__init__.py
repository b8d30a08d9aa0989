"""Runs the project's Metal kernels on the CPU, for tests: a launcher that holds them to Metal's rules.

    launch = EmulatorLauncher()                       # a Launcher, see mlxpaged.kernels.launch
    kernel = metal_kernel(name, inputs, outputs, source)   # or called like mx.fast.metal_kernel

What it cannot see: flags of a barrier (mem_none orders here as well), races that neither of two thread orders shows,
a C++17 feature that Metal lacks, and everything about speed, registers and a GPU's fast mathematics.
"""

import os

import pytest

from .build import CompileError, missing_tool
from .generate import generate
from .launch import EmulatorLauncher, metal_kernel
from .machine import BACKWARD, FORWARD, KernelError

__all__ = [
    "BACKWARD",
    "FORWARD",
    "CompileError",
    "EmulatorLauncher",
    "KernelError",
    "generate",
    "metal_kernel",
    "require_tools",
]


def require_tools() -> None:
    """Skip the calling test, naming what this machine lacks; under CI=true fail it."""
    if reason := missing_tool():
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
