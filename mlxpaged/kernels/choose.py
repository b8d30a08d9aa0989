"""Kernels or plain MLX operations? Owns the decision for a whole pool, made from device, self-test and timings that are
remembered between starts. Builds no pool and runs no step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from ..config import Attention
from ..errors import ConfigError
from .launch import CudaLauncher, Launcher, MetalLauncher
from .records import Record, read_record, record_path, write_record
from .selftest import DISPENSABLE, OnProgress, SelfTestReport, run_selftest
from .template import KernelTemplate
from .timing import PathChoice, time_decode


@dataclass(frozen=True, slots=True)
class Device:
    """What MLX computes on by default; `name` is the maker's."""

    kind: Literal["metal", "cuda", "cpu"]
    name: str

    @staticmethod
    def current() -> Device:
        name = str(mx.device_info().get("device_name", "unknown"))
        if mx.default_device().type != mx.DeviceType.gpu:
            return Device("cpu", name)
        return Device("metal" if mx.metal.is_available() else "cuda", name)

    def launcher(self) -> Launcher | None:
        match self.kind:
            case "metal":
                return MetalLauncher()
            case "cuda":
                return CudaLauncher()
        return None


@dataclass(frozen=True)
class AttentionPath:
    """How a pool is read and written: by kernels through `launcher`, which `choice` may prefer or not size by size, or
    (None) by plain MLX operations. `why` says what decided it; `warning` is set when kernels were wanted and failed.
    `spared`: kernels that failed and that something else stands in for."""

    launcher: Launcher | None
    choice: PathChoice
    device: Device
    why: str
    warning: str | None = None
    spared: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return "plain MLX" if self.launcher is None else f"kernels on {self.device.kind}"

    @property
    def lines(self) -> tuple[str, ...]:
        """For a person: the path and why; where times were taken, how many sizes each way has won."""
        first = f"{self.name}: {self.why}"
        if not self.choice.times:
            return (first,)
        won = sum(time.kernel_s <= time.gather_s for time in self.choice.times)
        return first, f"paged_decode is the faster way at {won} of {len(self.choice.times)} timed sizes"


@dataclass(frozen=True)
class Trial:
    """How the kernels are tried: the device and its launcher, and what tests and times them. Tests replace parts."""

    device: Device
    launcher: Launcher | None
    test: Callable[..., SelfTestReport] = run_selftest
    times: Callable[[Launcher, Sequence[KernelTemplate]], PathChoice] = time_decode

    @staticmethod
    def here() -> Trial:
        device = Device.current()
        return Trial(device, device.launcher())


def choose_path(
    mode: Attention,
    templates: Sequence[KernelTemplate],
    on_progress: OnProgress | None = None,
    trial: Trial | None = None,
) -> AttentionPath:
    """The path for a pool whose layers are `templates`. Must come before the pool is made: timing needs room.

    "auto" takes the kernels on a GPU where they pass their self-test, per size where they are faster. "kernel" insists:
    ConfigError where they cannot serve. "plain" asks nothing. Where only DISPENSABLE ones fail, the others serve.
    `on_progress` gets a line when the test is slow.
    """
    trial = trial or Trial.here()
    if mode == "plain":
        return _plain(trial.device, "--attention plain")
    if trial.launcher is None:
        if mode == "kernel":
            raise ConfigError("--attention kernel needs a GPU, and MLX runs on the CPU here; use --attention auto")
        return _plain(trial.device, "MLX runs on the CPU")
    reason = next((template.unsupported for template in templates if template.unsupported), None)
    record = None if reason else _record(trial, trial.launcher, templates, on_progress)
    failure = reason or (record.selftest.failure if record else None)
    if failure and mode == "kernel":
        raise ConfigError(f"--attention kernel cannot work: {failure}; use --attention auto")
    if failure or record is None:
        warning = None if reason else f"the GPU kernels are not used on {trial.device.name}: {failure}"
        return _plain(trial.device, failure or "there is nothing to attend to", warning)
    failed = record.selftest.spared
    lines = [f"{DISPENSABLE[kernel]} on {trial.device.name}: {line}" for kernel, line in failed.items()]
    warning, spared = "; ".join(lines) or None, frozenset(failed)
    if mode == "kernel":
        return AttentionPath(trial.launcher, PathChoice(), trial.device, "--attention kernel", warning, spared)
    passed = sum(result.ok for result in record.selftest.results)
    why = f"{passed} self-test cases passed on {trial.device.name}"
    return AttentionPath(trial.launcher, record.choice, trial.device, why, warning, spared)


def _plain(device: Device, why: str, warning: str | None = None) -> AttentionPath:
    return AttentionPath(None, PathChoice(), device, why, warning)


def _record(
    trial: Trial, launcher: Launcher, templates: Sequence[KernelTemplate], on_progress: OnProgress | None
) -> Record | None:
    """Known or found out now; only a passed test is remembered, since a failure may pass."""
    if not templates:
        return None
    path = record_path(type(launcher).__name__, trial.device.name, templates)
    known = read_record(path)
    if known is not None:
        return known
    report = trial.test(launcher, templates, on_progress=on_progress)
    if report.failure is not None:
        return Record(report, PathChoice())
    if on_progress:
        on_progress("timing both ways of decoding; the result is kept")
    try:
        choice = trial.times(launcher, templates)
    except Exception as error:  # out of memory, most likely: the kernels are right, so they serve at every size
        if on_progress:
            on_progress(f"the GPU kernels could not be timed: {error}")
        return Record(report, PathChoice())
    mx.clear_cache()
    record = Record(report, choice)
    if not report.spared:
        write_record(path, record)
    return record
