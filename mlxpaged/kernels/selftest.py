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

_DISPENSABLE = "rope_write"  # decode graphs can do without it; a pool cannot do without any other

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """What was asked, in order; ends with the first `failure` unless all cases were wanted."""

    results: tuple[CaseResult, ...]

    @property
    def failure(self) -> str | None:
        """The first failure of the kernels that a pool needs, in one line; None when all passed."""
        return next((result.line for result in self._failed() if result.kernel != _DISPENSABLE), None)

    @property
    def rope_failure(self) -> str | None:
        """The same for rope_write."""
        return next((result.line for result in self._failed() if result.kernel == _DISPENSABLE), None)

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
    """Ask every case of `templates`; stop at the first `failure` (one of rope_write is none) unless `every_case`. Never
    raises for what a kernel does. `on_progress` gets one line once the test has taken longer than a second."""
    cases = list(selftest_cases(templates, extent))
    results: list[CaseResult] = []
    started, said = clock(), on_progress is None
    for index, case in enumerate(cases):
        if not said and clock() - started > _SLOW_S:
            said = True
            assert on_progress is not None
            on_progress(f"testing the GPU kernels, case {index + 1} of {len(cases)}; the result is kept")
        results.append(ask(case, launch))
        if not results[-1].ok and not every_case and case.kernel != _DISPENSABLE:
            break
    return SelfTestReport(tuple(results))
