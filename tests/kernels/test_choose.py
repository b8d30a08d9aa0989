"""Which path a pool takes: by device, by flag, by self-test, by record; a damaged record counts for nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlxpaged.errors import ConfigError
from mlxpaged.kernels import choose, records
from mlxpaged.kernels.choose import AttentionPath, Device, Trial, choose_path
from mlxpaged.kernels.question import CaseResult
from mlxpaged.kernels.selftest import SelfTestReport
from mlxpaged.kernels.template import KernelTemplate
from mlxpaged.kernels.timing import BucketTime, PathChoice

TEMPLATE = KernelTemplate("bfloat16", 8, 4, 128, 128, layers=32)
GPU = Device("metal", "Apple M4 Max")
PASSED = CaseResult("paged_decode", "some case", 1e-3, 1.6e-2)
FAILED = CaseResult("paged_decode", "some case", 0.25, 1.6e-2)
CHOICE = PathChoice((BucketTime(1, 128, 2e-5, 1e-5), BucketTime(8, 1024, 1e-5, 4e-5)))


def launch(*_: object, **__: object) -> list[mx.array]:
    raise AssertionError("nothing is launched by a choice")


@dataclass
class Lab:
    """Counts tests and timings; the test's verdict is given."""

    result: CaseResult = PASSED
    tested: int = 0
    timed: int = 0
    said: list[str] = field(default_factory=list)
    device: Device = GPU
    error: Exception | None = None

    def test(self, *_: object, **__: object) -> SelfTestReport:
        self.tested += 1
        return SelfTestReport((self.result,))

    def times(self, *_: object) -> PathChoice:
        self.timed += 1
        if self.error:
            raise self.error
        return CHOICE

    def choose(self, mode: choose.Attention = "auto", *templates: KernelTemplate) -> AttentionPath:
        trial = Trial(self.device, None if self.device.kind == "cpu" else launch, self.test, self.times)
        return choose_path(mode, templates or (TEMPLATE,), self.said.append, trial)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def test_on_a_gpu_that_passes_the_kernels_serve_where_they_are_faster() -> None:
    path = Lab().choose()
    assert path.launcher is launch and path.warning is None
    assert not path.choice.use_kernel(1, 128) and path.choice.use_kernel(8, 1024)
    assert path.lines == (
        "kernels on metal: 1 self-test cases passed on Apple M4 Max",
        "paged_decode is the faster way at 1 of 2 timed sizes",
    )


def test_what_was_found_out_is_kept_for_these_versions_device_texts_and_templates(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab()
    assert lab.choose().choice == lab.choose().choice == CHOICE
    assert (lab.tested, lab.timed) == (1, 1) and len(list(cache.iterdir())) == 1
    lab.choose("auto", replace(TEMPLATE, window=128))
    assert lab.tested == 2
    lab.device = replace(GPU, name="Apple M1")
    lab.choose()
    assert lab.tested == 3
    monkeypatch.setattr(records, "SPECS", records.SPECS[:-1])
    lab.choose()
    assert lab.tested == 4
    monkeypatch.setattr(records, "version", lambda name: "0.99.0")
    lab.choose()
    assert lab.tested == 5 and len(list(cache.iterdir())) == 5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"selftest": [], "times": []}',
        '{"selftest": [{"kernel": "x"}], "times": []}',
        '{"selftest": 3, "times": 4}',
        '{"selftest": [{"kernel": "k", "case": "c", "error": "0", "tolerance": 1}], "times": []}',
        '{"selftest": [{"kernel": "k", "case": "c", "error": 2, "tolerance": 1}], "times": []}',
        '{"selftest": [{"kernel": "rope_write", "case": "c", "error": "0", "tolerance": 1}], "times": []}',
        '{"selftest": [{"kernel": "k", "case": "c", "error": 0, "tolerance": 1}], "times": [{"rows": 1}]}',
        "\ufeff\x00",
        "[" * 100_000,
    ],
)
def test_a_damaged_record_is_made_again(cache: Path, text: str) -> None:
    lab = Lab()
    lab.choose()
    (record,) = cache.iterdir()
    record.write_text(text)
    assert lab.choose().choice == CHOICE and lab.tested == 2
    lab.choose()
    assert lab.tested == 2 and json.loads(record.read_text())["times"][0]["rows"] == 1


def test_a_record_that_is_no_text_or_no_number_is_made_again(cache: Path) -> None:
    lab = Lab()
    lab.choose()
    (record,) = cache.iterdir()
    whole = record.read_text()
    for damaged in (b"\xff\xfe\x00", whole[: len(whole) // 2].encode(), whole.replace("2e-05", "NaN").encode()):
        before = lab.tested
        record.write_bytes(damaged)
        lab.choose()
        assert lab.tested == before + 1


def test_a_folder_that_cannot_be_written_only_costs_the_test_again(cache: Path) -> None:
    cache.write_text("a file is in the way")
    lab = Lab()
    assert lab.choose().launcher is launch and lab.choose().launcher is launch
    assert lab.tested == 2


def test_a_mismatch_falls_back_for_the_whole_pool_with_one_line_and_is_tried_again() -> None:
    lab = Lab(FAILED)
    path = lab.choose()
    assert path.launcher is None and lab.timed == 0
    assert path.warning == (
        "the GPU kernels are not used on Apple M4 Max: paged_decode on some case: error 2.5e-01, allowed 1.6e-02"
    )
    lab.result = PASSED
    assert lab.choose().launcher is launch


@pytest.mark.parametrize("mode", ["auto", "kernel"])
@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("rope_write", "decode steps do without rope_write on Apple M4 Max"),
        ("draw", "tokens are drawn by MLX's own operations on Apple M4 Max"),
    ],
)
def test_where_only_a_dispensable_kernel_fails_the_others_serve_and_it_is_tried_again(
    kernel: str, said: str, mode: choose.Attention
) -> None:
    lab = Lab(replace(FAILED, kernel=kernel))
    path = lab.choose(mode)
    assert path.launcher is launch and path.spared == {kernel}
    assert path.warning == f"{said}: {kernel} on some case: error 2.5e-01, allowed 1.6e-02"
    lab.result = PASSED
    path = lab.choose(mode)
    assert path.launcher is launch and not path.spared and path.warning is None


def test_kernel_insists_and_says_what_works_where_it_cannot() -> None:
    path = Lab().choose("kernel")
    assert path.launcher is launch and path.choice.use_kernel(1, 128)
    with pytest.raises(ConfigError, match=r"--attention kernel cannot work: paged_decode .* use --attention auto"):
        Lab(FAILED, device=replace(GPU, name="another")).choose("kernel")
    with pytest.raises(ConfigError, match=r"--attention kernel needs a GPU.* use --attention auto"):
        Lab(device=Device("cpu", "AMD")).choose("kernel")


def test_plain_and_the_cpu_test_nothing() -> None:
    lab = Lab()
    assert lab.choose("plain").launcher is None and lab.choose("plain").why == "--attention plain"
    lab.device = Device("cpu", "AMD")
    path = lab.choose()
    assert (path.launcher, path.name, path.why, lab.tested) == (None, "plain MLX", "MLX runs on the CPU", 0)


def test_layers_no_kernel_can_serve_take_the_plain_path_without_a_test() -> None:
    lab = Lab()
    path = lab.choose("auto", TEMPLATE, replace(TEMPLATE, key_width=576))
    assert path.launcher is None and lab.tested == 0
    assert path.why == "the kernels take widths that are multiples of 8 up to 256, not 576"


def test_kernels_that_cannot_be_timed_serve_at_every_size_and_are_timed_next_time() -> None:
    lab = Lab(error=RuntimeError("out of memory"))
    path = lab.choose()
    assert path.launcher is launch and path.choice == PathChoice()
    assert lab.said[1:] == ["the GPU kernels could not be timed: out of memory"]
    lab.error = None
    assert lab.choose().choice == CHOICE


def test_this_machine_is_asked_without_a_trial() -> None:
    device = Device.current()
    assert device.name and (device.kind == "cpu") == (mx.default_device().type == mx.DeviceType.cpu)
    if device.kind == "cpu":
        assert choose_path("auto", (TEMPLATE,)).launcher is None
