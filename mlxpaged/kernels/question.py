"""One question to the device, and its answer: a kernel runs, and its error against a float64 reference is within a
tolerance or not. Owns what a question is and how an error is measured; knows no kernel.

References run in numpy on the host: a GPU's own float32 product may round to TF32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .launch import Launcher


@dataclass(frozen=True, slots=True)
class SelfTestCase:
    """One question to the device; `run` returns the largest error, relative to the largest value expected."""

    kernel: str
    name: str
    tolerance: float
    run: Callable[[Launcher], float]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """`error` is infinite where something was not finite or raised; `message` is what was raised."""

    kernel: str
    case: str
    error: float
    tolerance: float
    message: str | None = None

    @property
    def ok(self) -> bool:
        return self.message is None and self.error <= self.tolerance

    @property
    def line(self) -> str:
        """Kernel, case and what was seen, in one line."""
        if self.message is not None:
            return f"{self.kernel} failed on {self.case}: {self.message}"
        return f"{self.kernel} on {self.case}: error {self.error:.1e}, allowed {self.tolerance:.1e}"


def ask(case: SelfTestCase, launch: Launcher) -> CaseResult:
    """What the device does with `case`; never raises for it."""
    try:
        error, message = case.run(launch), None
    except Exception as raised:  # compilers' and drivers' own kinds; the first line names the trouble
        lines = str(raised).strip().splitlines() or [""]
        error, message = float("inf"), f"{type(raised).__name__}: {lines[0]}".rstrip(": ")
    return CaseResult(case.kernel, case.name, error, case.tolerance, message)


def float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def relative_error(got: mx.array, expected: np.ndarray) -> float:
    """max|error| / max|expected|; infinite where something is not finite."""
    difference = np.abs(float64(got) - expected)
    if not np.isfinite(difference).all():
        return float("inf")
    return float(difference.max() / max(np.abs(expected).max(), 1e-30))
