"""scripts/profile_step.py: its figures from a trace, and its answer where there is no profiler to be had."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.errors import ConfigError
from mlxpaged.model.runner import ModelRunner, PendingStep
from mlxpaged.sched.requests import StepPlan

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture(scope="module")
def profile_step() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    try:
        import profile_step
    finally:
        sys.path.remove(str(SCRIPTS))
    return profile_step


def event(begin: float, length: float, name: str, kind: str = "kernel") -> dict[str, Any]:
    return {"cat": kind, "ts": begin, "dur": length, "name": name}


def test_what_ran_on_the_device_is_summed_by_kernel(profile_step: Any) -> None:
    write = "void mlx::core::cu::custom_kernel_rope_write_64<float>(float const*, int)"
    trace = {
        "traceEvents": [
            event(30, 4, write),
            {"ph": "M", "name": "process_name"},
            event(0, 10, "nvjet"),
            event(8, 4, write),
            event(5, 1, "cudaLaunchKernel", "cuda_runtime"),
            event(20, 100, write),
            event(121, 1, "Memcpy DtoD", "gpu_memcpy"),
        ]
    }
    calls = profile_step.kernel_calls(trace)
    assert [call.begin for call in calls] == [0, 8, 20, 30, 121]
    found = profile_step.step_figures(calls, 2)
    # Idle from 12 to 20 and from 120 to 121; one call of rope_write took 96 more than the median.
    assert (found["span"], found["busy"], found["idle"], found["waits"]) == (61, 59.5, 4.5, 48)
    assert [kernel["name"] for kernel in found["kernels"]] == ["rope_write_64<float>", "nvjet", "Memcpy DtoD"]
    assert found["kernels"][0] == {
        "name": "rope_write_64<float>", "calls": 1.5, "us": 54, "median": 4, "most": 100,
    }  # fmt: skip
    shown = profile_step.table({"model": "8b", "bits": 16, "rows": 32, **found})
    assert shown.startswith("8b, 16 bits, 32 rows: 61 us a step") and "rope_write_64<float>" in shown


def test_no_kernel_at_all_is_an_error(profile_step: Any) -> None:
    with pytest.raises(ConfigError, match="no kernel was seen"):
        profile_step.step_figures([], 1)


def test_kernels_that_differ_in_a_template_argument_are_not_one(profile_step: Any) -> None:
    norm = "void mlx::core::cu::rms_norm<__nv_bfloat16, (int){}>(__nv_bfloat16 const*, int)"
    names = [
        norm.format(4),
        norm.format(8),
        "void (anonymous namespace)::softmax<float>(float*)",
        "nvjet_hsh" + 80 * "x",
    ]
    found = profile_step.step_figures([profile_step.KernelCall(at, 1, name) for at, name in enumerate(names)], 1)
    assert [kernel["name"] for kernel in found["kernels"]] == [
        "rms_norm<__nv_bfloat16, (int)4>", "rms_norm<__nv_bfloat16, (int)8>", "softmax<float>", names[3],
    ]  # fmt: skip
    shown = profile_step.table({"model": "8b", "bits": 16, "rows": 32, **found}).splitlines()
    assert shown[-1].endswith("...") and max(map(len, shown)) <= 100


def test_every_row_decodes_in_each_profiled_step(profile_step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    launch = ModelRunner.launch

    def noted(self: ModelRunner, plan: StepPlan, *rest: Any) -> PendingStep:
        rows.append(len(plan.decode_rows))
        return launch(self, plan, *rest)

    def profiled(run: Callable[[], None]) -> list[Any]:
        rows.clear()
        run()
        return [profile_step.KernelCall(0, 1, "kernel")]

    monkeypatch.setattr(profile_step, "device_profiler", lambda: profiled)
    monkeypatch.setattr(ModelRunner, "launch", noted)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    arguments = ["--model", "tiny", "--bits", "32", "--batch", "32", "--context", "16-256", "--steps", "12"]
    monkeypatch.setattr(sys, "argv", ["profile_step.py", *arguments])
    profile_step.bench(profile_step.parse_arguments())
    assert rows == [32] * 12


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="there is a torch")
def test_without_torch_it_says_so() -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPTS / "profile_step.py"), "--model", "tiny"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2 and ran.stderr == (
        "profile_step: this needs torch with CUDA, whose profiler it uses; there is no torch here\n"
    )
