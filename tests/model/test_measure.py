"""The parts of a report that need a GPU, run on emulated kernels, and those that need none."""

from __future__ import annotations

from functools import partial

import pytest

from mlxpaged.cli.report_page import as_markdown
from mlxpaged.engine.report import Section
from mlxpaged.kernels import bench
from mlxpaged.kernels.encoder import EncoderLimits
from mlxpaged.kernels.launch import Launcher
from mlxpaged.kernels.selftest import run_selftest
from mlxpaged.kernels.selftest_cases import Extent
from mlxpaged.kernels.template import KernelTemplate
from mlxpaged.model import measure
from mlxpaged.model.kvspec import probe
from tests.emulator import FORWARD, EmulatorLauncher, require_tools

TEMPLATES = (KernelTemplate("float32", 1, 2, 32, 32), KernelTemplate("float32", 1, 2, 32, 32, window=24))


def lab(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> measure.KernelLab:
    quick = partial(run_selftest, extent=Extent(order_kernels=12, positions=(1,), longest=64))
    monkeypatch.setattr(measure, "run_selftest", quick)
    for name, value in (("_ORDER_KERNELS", 12), ("_STEPS", 2), ("_READ_BYTES", 1 << 20)):
        monkeypatch.setattr(bench, name, value)
    return measure.KernelLab(launch, TEMPLATES)


@pytest.mark.needs_tool
def test_every_part_that_needs_a_gpu_can_be_put_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    require_tools()
    emulated = lab(EmulatorLauncher(passes=(FORWARD,)), monkeypatch)
    tested = emulated.selftest()
    assert tested["cases"] == 2 * 7 + 2 and tested["failed"] == []
    rates = emulated.rates(budget_s=0.0)
    assert [one["layers"] for one in rates] == [template.name for template in TEMPLATES]
    text = as_markdown([], [Section("Self-test", "ok", tested), Section("Rates", "ok", rates)])
    assert "- cases: 16" in text and "- failed: none" in text
    assert "| float32 1x2 heads 32/32 window 24 | 8 | 1024 |" in text


def test_broken_kernels_are_told_case_by_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> list[object]:
        raise RuntimeError("no library")

    tested = lab(broken, monkeypatch).selftest()  # type: ignore[arg-type]
    assert len(tested["failed"]) == tested["cases"] == 16
    assert tested["failed"][0] == "kv_write failed on read back float32 1x2 heads 32/32: RuntimeError: no library"


def test_the_tiny_model_is_served_by_the_pool_and_its_commits_are_predicted() -> None:
    loaded = measure.tiny_model()
    spec = probe(loaded.model)
    assert len(spec.layers) == 4 and spec.vocab_size == 8192
    rows = measure.commits(loaded, EncoderLimits(100, 4096))
    assert [row["pool_tokens"] for row in rows] == [2048, 16384, 65536]
    assert all(row["ours"] <= row["mlx_limits_base_and_Pro"] for row in rows)
    assert "ours" not in measure.commits(loaded, None)[0]


def test_stock_arrivals_come_from_every_prompt() -> None:
    loaded = measure.tiny_model()
    found = measure.stock_arrivals(measure.stock_twin(loaded), [[1, 2, 3], [4, 5, 6]], 4)
    assert [number for _, number in found].count(0) == [number for _, number in found].count(1) == 4
    assert found == sorted(found)
