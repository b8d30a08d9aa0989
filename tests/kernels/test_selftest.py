"""The self-test passes on sound kernels and names kernel and case where one is not: every seeded fault is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import pytest

from mlxpaged.kernels.launch import KernelSpec, Launcher
from mlxpaged.kernels.partitions import MOST_TOKENS
from mlxpaged.kernels.selftest import run_selftest
from mlxpaged.kernels.selftest_cases import Extent, selftest_cases
from mlxpaged.kernels.template import KernelTemplate
from tests.emulator import FORWARD, EmulatorLauncher, require_tools

pytestmark = pytest.mark.needs_tool

PLAIN = KernelTemplate("float32", 2, 2, 32, 32)
WINDOWED = KernelTemplate("bfloat16", 1, 3, 32, 64, window=24, sinks=True)
QUICK = Extent(order_kernels=24, positions=(1, 2), longest=200)


@pytest.fixture(autouse=True, scope="module")
def tools() -> None:
    require_tools()


@dataclass(frozen=True)
class Patched:
    """The emulator with one kernel's text, or its result, changed."""

    kernel: str
    text: Callable[[str], str] = str
    result: Callable[[list[mx.array]], list[mx.array]] = list

    def __call__(self, spec: KernelSpec, inputs: list[mx.array], **how: object) -> list[mx.array]:
        launch = EmulatorLauncher(passes=(FORWARD,))
        if spec.name != self.kernel:
            return launch(spec, inputs, **how)
        changed = self.text(spec.source)
        assert changed != spec.source or self.text is str
        return self.result(launch(replace(spec, source=changed), inputs, **how))


def failure_on(launch: Launcher, *templates: KernelTemplate) -> str | None:
    return run_selftest(launch, templates, extent=QUICK).failure


def test_sound_kernels_pass_for_every_template() -> None:
    report = run_selftest(EmulatorLauncher(passes=(FORWARD,)), [PLAIN, WINDOWED], extent=QUICK, every_case=True)
    assert report.failure is None
    kernels = {"kv_write", "rope_write", "block_copy", "kv_gather", "paged_decode", "draw"}
    assert {result.kernel for result in report.results} == kernels
    assert len(report.results) == 2 * (1 + 1 + 2 + 1 + 1 + 2) + 2


def test_a_wrong_slot_is_named_with_kernel_and_case() -> None:
    launch = Patched("kv_write", lambda text: text.replace("slots[", "1 + slots[", 1))
    line = failure_on(launch, PLAIN)
    assert line is not None and line.startswith("kv_write on read back float32 2x2 heads 32/32: error ")


def test_a_false_rotation_is_caught_in_either_kind() -> None:
    turned = "rotations[turn + second]"
    for kind, case in (("TRADITIONAL", "16 rotated traditionally"), ("!TRADITIONAL", "32 rotated")):
        fault = f"({kind} ? -1.0f : 1.0f) * {turned}"
        launch = Patched("rope_write", lambda text, fault=fault: text.replace(turned, fault))
        report = run_selftest(launch, [PLAIN], extent=QUICK)
        line = report.spared["rope_write"]
        assert line.startswith(f"rope_write on float32 2x2 heads 32/32 {case}: error "), line
        assert report.failure is None and sum(not result.ok for result in report.results) == 1


def test_what_rope_write_does_speaks_against_no_other_kernel() -> None:
    def broken(spec: KernelSpec, *arguments: object, **how: object) -> list[mx.array]:
        if spec.name == "rope_write":
            raise RuntimeError("no such type")
        return EmulatorLauncher(passes=(FORWARD,))(spec, *arguments, **how)

    report = run_selftest(broken, [PLAIN], extent=QUICK)
    assert report.failure is None and [result.ok for result in report.results] == [True] * 8 + [False] * 2
    assert report.spared == {
        "rope_write": "rope_write failed on float32 2x2 heads 32/32 32 rotated: RuntimeError: no such type"
    }


def test_a_false_draw_is_caught_and_speaks_against_no_other_kernel() -> None:
    for kernel, text, fault in (
        ("draw_parts", "* inverse + gumbel", "* inverse - gumbel"),
        ("draw", "count < top_k", "count <= top_k"),
        ("draw", "weight < most", "weight < 0.9f * most"),
        ("draw", "inverse >= least;", "inverse >= least - 0.1f;"),
    ):
        launch = Patched(kernel, lambda source, text=text, fault=fault: source.replace(text, fault))
        report = run_selftest(launch, [PLAIN], extent=QUICK)
        assert report.failure is None and list(report.spared) == ["draw"], (kernel, text)
        assert report.spared["draw"].startswith("draw on ")


def test_a_wrong_number_of_copied_slots_is_caught() -> None:
    def drop_last(results: list[mx.array]) -> list[mx.array]:
        return [results[0][1:], *results[1:]]

    line = failure_on(Patched("kv_gather", result=drop_last), PLAIN)
    assert line is not None and line.startswith("kv_write failed on order of 24 kernels float32")


def test_wrong_attention_is_caught_within_the_tolerance_of_its_dtype() -> None:
    def scaled(by: float) -> Callable[[list[mx.array]], list[mx.array]]:
        return lambda results: [results[0] * by, *results[1:]]

    assert failure_on(Patched("paged_decode", result=scaled(1 + 1e-6)), PLAIN) is None
    line = failure_on(Patched("paged_decode", result=scaled(1 + 1e-4)), PLAIN)
    assert line is not None and "allowed 2.0e-05" in line
    assert failure_on(Patched("paged_decode", result=scaled(1.01)), WINDOWED) is None
    line = failure_on(Patched("paged_decode", result=scaled(1.05)), WINDOWED)
    assert line is not None and "bfloat16 1x3 heads 32/64 window 24 sinks" in line and "allowed 1.6e-02" in line


def test_a_write_that_goes_into_a_copy_is_caught() -> None:
    def launch(spec: KernelSpec, inputs: list[mx.array], **how: object) -> list[mx.array]:
        copies = [
            mx.array(x) + 0 if name in spec.inplace else x for name, x in zip(spec.input_names, inputs, strict=True)
        ]
        return EmulatorLauncher(passes=(FORWARD,))(spec, copies, **how)

    line = failure_on(launch, PLAIN)
    assert line is not None and line.startswith("kv_write on read back")


def test_a_nan_and_an_exception_are_failures_in_one_line() -> None:
    spoiled = Patched("kv_gather", result=lambda results: [results[0] * float("nan"), *results[1:]])
    line = failure_on(spoiled, PLAIN)
    assert line is not None and line.endswith("error inf, allowed 2.0e-05")

    def broken(*_: object, **__: object) -> list[mx.array]:
        raise RuntimeError("cannot build the library\nprogram_source:12: error: unknown type\n")

    report = run_selftest(broken, [PLAIN], extent=QUICK)
    assert report.failure == (
        "kv_write failed on read back float32 2x2 heads 32/32: RuntimeError: cannot build the library"
    )
    assert len(report.results) == 1
    everything = run_selftest(broken, [PLAIN], extent=QUICK, every_case=True)
    assert len(everything.results) == 10 and not any(result.ok for result in everything.results)


def test_a_slow_test_says_so_once() -> None:
    def ticks() -> Iterator[float]:
        yield from (0.0, 0.4, 0.8, 1.2, 1.6, 2.0, 2.4, 2.8, 3.2, 3.6, 4.0)

    said: list[str] = []
    times = ticks()

    def broken(*_: object, **__: object) -> list[mx.array]:
        raise RuntimeError("no")

    run_selftest(broken, [PLAIN], extent=QUICK, every_case=True, on_progress=said.append, clock=lambda: next(times))
    assert said == ["testing the GPU kernels, case 3 of 10; the result is kept"]


def test_the_full_extent_reaches_beyond_a_partition_and_the_window() -> None:
    def longest(window: int | None) -> int:
        cases = selftest_cases([replace(PLAIN, window=window)])
        contexts = [case.name.rpartition("contexts ")[2].split(",") for case in cases if case.kernel == "paged_decode"]
        return max(int(context) for row in contexts for context in row)

    assert longest(None) == MOST_TOKENS + 37
    assert [longest(window) for window in (24, 128, 1024, 2048, 4096, 32768)] == [90, 135, 1061, 2085, 4133, 4133]
