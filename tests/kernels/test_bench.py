"""The figures of a report, measured on emulated kernels: their shape and their arithmetic, not their speed."""

from __future__ import annotations

import numpy as np
import pytest

from mlxpaged.kernels import bench
from mlxpaged.kernels.selftest_cases import order_error
from mlxpaged.kernels.template import KernelTemplate
from tests.emulator import FORWARD, EmulatorLauncher, require_tools

pytestmark = pytest.mark.needs_tool
TEMPLATE = KernelTemplate("float32", 1, 2, 32, 32)
EMULATED = EmulatorLauncher(passes=(FORWARD,))


@pytest.fixture(autouse=True, scope="module")
def tools() -> None:
    require_tools()


def test_the_graph_without_tokens_is_the_same_work() -> None:
    """The emulator runs in the order written, so that only a lazy device can tell the two apart."""
    for chained in (True, False):
        assert order_error(EMULATED, TEMPLATE, np.random.default_rng(0), 24, chained=chained) == 0.0


def test_every_kind_of_figure_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_ORDER_KERNELS", 12)
    monkeypatch.setattr(bench, "_STEPS", 2)
    monkeypatch.setattr(bench, "_READ_BYTES", 1 << 20)
    assert bench.order_with_and_without_tokens(EMULATED, TEMPLATE) == {
        "error_with_tokens": 0.0,
        "error_without_tokens": 0.0,
    }
    written = bench.write_times(EMULATED, TEMPLATE, 256)
    assert written["pool_tokens"] == 256 and written["kv_write_us"] > 0 and written["mlx_write_us"] > 0
    first = bench.first_launches(EMULATED, TEMPLATE)
    assert {name: len(times) for name, times in first.items()} == {"paged_decode_ms": 2, "kv_gather_ms": 2}
    (rate,) = bench.decode_rates(EMULATED, TEMPLATE, budget_s=0.0)
    assert (rate["rows"], rate["context"]) == (8, 1024)
    bytes_read = 8 * 1024 * 1 * (32 + 32) * 4
    assert rate["GB/s"] == pytest.approx(bytes_read / rate["paged_decode_us"] / 1e3, abs=0.1)
