"""What the examination says of versions and systems it was not made on."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxpaged.kernels.encoder import EncoderLimits
from mlxpaged.kernels.template import KernelTemplate
from mlxpaged.model import examine, machine
from mlxpaged.model.attention_path import kernel_templates
from mlxpaged.model.kvspec import KVSpec, LayerSpec
from mlxpaged.model.startup import Startup


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.32.4", (0, 32, 4)), ("0.33.1.dev20260822+abc", (0, 33, 1)), ("1.0rc1", (1, 0)), ("unknown", ())],
)
def test_numbers_of_a_version(text: str, numbers: tuple[int, ...]) -> None:
    assert machine.version_numbers(text) == numbers


@pytest.mark.parametrize(
    ("installed", "tested"), [("0.32.3", False), ("0.32.4", True), ("0.33.9", True), ("0.34.0", False), ("1.0", False)]
)
def test_versions_outside_the_tested_ones_are_worth_knowing(
    installed: str, tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "version", lambda package: installed)
    found = machine.package_finding("mlx")
    assert found.value == installed and not found.problem
    assert (found.advice is None) == tested
    assert tested or "from 0.32.4 up to, but without, 0.34" in str(found.advice)


def test_a_missing_package_and_two_backends_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "mlx-lm":
            raise machine.PackageNotFoundError(package)
        return "0.32.4"

    monkeypatch.setattr(machine, "version", version)
    found = {one.name: one for one in machine.versions()}
    assert found["mlx-lm"].problem and "pip install 'mlx-lm>=0.32.2'" in str(found["mlx-lm"].advice)
    assert found["backends"].problem and "overwrite each other" in str(found["backends"].advice)


def test_a_mac_says_what_the_gpu_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(machine, "_sysctl", lambda name: {"iogpu.wired_limit_mb": "0"}.get(name, "Apple M4"))
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine.platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
    assert machine.system().problem and machine.system().value.startswith("macOS 26.1 x86_64, Apple M4")
    assert machine.gpu_memory()[-1].value == "the system's default (sysctl iogpu.wired_limit_mb)"
    assert machine.blas(Startup(None, None)).value == "the system's own"
    limits = machine.encoder(Startup(None, EncoderLimits(100, 8192)))
    assert limits.value.startswith("100 kernels or 8192 x 2^20 elements a command buffer (MLX's own: 40/40 on base")


def test_layers_of_one_kind_become_one_template() -> None:
    full = LayerSpec(8, 128, 128, mx.bfloat16, None, 32)
    windowed = LayerSpec(8, 128, 64, mx.bfloat16, 1024, 64, True)
    assert kernel_templates(KVSpec((windowed, full, windowed), 100)) == (
        KernelTemplate("bfloat16", 8, 8, 128, 64, window=1024, sinks=True, layers=2),
        KernelTemplate("bfloat16", 8, 4, 128, 128, layers=1),
    )


def test_a_path_that_fell_back_asks_for_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    path = examine.AttentionPath(None, None, None, "reason", "the GPU kernels are not used on X: kv_write on Y")  # type: ignore[arg-type]
    monkeypatch.setattr(examine.AttentionPath, "lines", ("plain MLX: reason",))
    _, (found,) = examine._attention(lambda: path)
    assert not found.problem and found.value == "plain MLX: reason"
    assert str(found.advice).startswith("the GPU kernels are not used on X: kv_write on Y; please report it")


def test_a_broken_device_is_a_problem_with_its_text() -> None:
    def breaks() -> examine.AttentionPath:
        raise RuntimeError("[METAL] no device")

    _, (found,) = examine._attention(breaks)
    assert found.problem and found.value == "failed: RuntimeError: [METAL] no device"


def test_a_load_tells_untested_versions_and_a_missing_blas_once(monkeypatch) -> None:
    monkeypatch.setattr(machine, "_installed", lambda package: {"mlx": "0.35.1", "mlx-lm": "0.32.2"}.get(package))
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.delenv("MLXPAGED_BLAS", raising=False)
    untested, hint = machine.startup_notes(Startup(None, None))
    assert untested.startswith("mlx 0.35.1: it is untested") and "0.34" in untested
    assert "openblas" in hint.lower()
    monkeypatch.setattr(machine, "_installed", lambda package: "0.32.4")
    assert machine.startup_notes(Startup("libopenblas.so.0", None)) == ()
