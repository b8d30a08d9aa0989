"""The choice between the ways of decoding: the nearest timed size answers, and time runs out gracefully."""

from __future__ import annotations

import pytest

from mlxpaged.kernels.template import KernelTemplate
from mlxpaged.kernels.timing import BucketTime, PathChoice, Ways, prepare, summed, time_decode, time_paths
from tests.emulator import FORWARD, EmulatorLauncher, require_tools


class Clock:
    """Time passes only in the ways it hands out."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[tuple[int, int]] = []

    def __call__(self) -> float:
        return self.now

    def prepare(self, rows: int, context: int) -> Ways | None:
        """Kernels win from 2048 tokens of all rows together on; 64 rows of 8192 tokens do not fit."""
        if rows * context > 64 * 4096:
            return None
        self.asked.append((rows, context))
        kernel_s, gather_s = 0.010, 0.010 * rows * context / 2048
        return Ways(lambda: self.pass_by(kernel_s * 4), lambda: self.pass_by(gather_s * 4), calls=4)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def test_every_size_is_timed_when_there_is_time() -> None:
    clock = Clock()
    choice = time_paths(clock.prepare, budget_s=1e9, clock=clock)
    assert len(choice.times) == 7 * 7 - 1 == len(set(clock.asked))
    timed = {(time.rows, time.context): time for time in choice.times}
    assert timed[8, 1024].kernel_s == pytest.approx(0.010) and timed[8, 1024].gather_s == pytest.approx(0.040)


def test_the_nearest_size_answers() -> None:
    clock = Clock()
    choice = time_paths(clock.prepare, budget_s=1e9, clock=clock)
    assert not choice.use_kernel(1, 128) and not choice.use_kernel(1, 1024) and choice.use_kernel(1, 2048)
    assert not choice.use_kernel(8, 128) and choice.use_kernel(8, 300) and choice.use_kernel(64, 8192)
    assert not choice.use_kernel(1, 1) and choice.use_kernel(1000, 10**6)


def test_when_time_runs_out_the_corners_have_been_seen() -> None:
    clock = Clock()
    choice = time_paths(clock.prepare, budget_s=5.0, clock=clock)
    assert clock.asked[:4] == [(8, 1024), (8, 128), (1, 1024), (8, 8192)] and len(choice.times) < 48
    assert not choice.use_kernel(1, 128) and choice.use_kernel(8, 8192)
    first_only = time_paths(Clock().prepare, budget_s=0.0)
    assert [(time.rows, time.context) for time in first_only.times] == [(8, 1024)]


def test_without_times_the_kernel_serves() -> None:
    assert PathChoice().use_kernel(1, 1) and PathChoice().use_kernel(0, 0)


def test_layers_of_two_kinds_are_summed_where_both_were_timed() -> None:
    full = PathChoice((BucketTime(1, 128, 2.0, 1.0), BucketTime(8, 128, 1.0, 4.0)))
    windowed = PathChoice((BucketTime(1, 128, 1.0, 2.0),))
    assert summed([full, windowed], [1, 5]).times == (BucketTime(1, 128, 7.0, 11.0),)
    assert summed([full, windowed], [5, 1]).use_kernel(1, 128) is False


@pytest.mark.needs_tool
def test_both_ways_run_on_real_kernels() -> None:
    require_tools()
    launch = EmulatorLauncher(passes=(FORWARD,))
    template = KernelTemplate("float32", 1, 2, 32, 32, window=48, sinks=True, layers=3)
    choice = time_decode(launch, [template], budget_s=0.0)
    (time,) = choice.times
    assert (time.rows, time.context) == (8, 1024) and time.kernel_s > 0 and time.gather_s > 0


def test_sizes_that_take_too_much_memory_are_left_out() -> None:
    launch = EmulatorLauncher()
    assert prepare(launch, KernelTemplate("float32", 64, 1, 256, 256), 64, 8192) is None
