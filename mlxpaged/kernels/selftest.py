"""Do the kernels work on this device? Owns the run over all cases and its verdict; never decides what follows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .launch import Launcher
from .question import CaseResult, ask
from .selftest_cases import FULL, Extent, selftest_cases
from .template import KernelTemplate

_SLOW_S = 1.0

DISPENSABLE = {
    "rope_write": "decode steps do without rope_write",
    "draw": "tokens are drawn by MLX's own operations",
}
"""Kernels that something else can stand in for, and what is said of it. A pool cannot do without any other."""

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """What was asked, in order; ends with the first `failure` unless all cases were wanted."""

    results: tuple[CaseResult, ...]

    @property
    def failure(self) -> str | None:
        """The first failure of the kernels that a pool needs, in one line; None when all passed."""
        return next((result.line for result in self._failed() if result.kernel not in DISPENSABLE), None)

    @property
    def spared(self) -> dict[str, str]:
        """Of the other kernels, those that failed, each with its first failure in one line."""
        lines = {result.kernel: result.line for result in reversed(self._failed())}
        return {kernel: lines[kernel] for kernel in DISPENSABLE if kernel in lines}

    def _failed(self) -> list[CaseResult]:
        return [result for result in self.results if not result.ok]


def run_selftest(
    launch: Launcher,
    templates: Sequence[KernelTemplate],
    *,
    on_progress: OnProgress | None = None,
    every_case: bool = False,
    extent: Extent = FULL,
    clock: Callable[[], float] = time.monotonic,
) -> SelfTestReport:
    """Ask every case of `templates`; stop at the first `failure` unless `every_case`. Never raises for what a kernel
    does. `on_progress` gets one line once the test has taken longer than a second."""
    cases = list(selftest_cases(templates, extent))
    results: list[CaseResult] = []
    started, said = clock(), on_progress is None
    for index, case in enumerate(cases):
        if not said and clock() - started > _SLOW_S:
            said = True
            assert on_progress is not None
            on_progress(f"testing the GPU kernels, case {index + 1} of {len(cases)}; the result is kept")
        results.append(ask(case, launch))
        if not results[-1].ok and not every_case and case.kernel not in DISPENSABLE:
            break
    return SelfTestReport(tuple(results))
