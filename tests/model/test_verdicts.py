"""What is remembered of a model: read back, found out anew where a record is damaged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mlxpaged.model.verdicts import remembered

from .families import tiny_model


class Finding:
    """Finds the same error each time, and counts how often it was asked."""

    def __init__(self, error: float | None) -> None:
        self.error = error
        self.asked = 0

    def __call__(self) -> float | None:
        self.asked += 1
        return self.error


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    return tmp_path / "checks"


@pytest.mark.parametrize("error", [0, 0.25, math.nan])
def test_an_error_is_found_once_for_each_kind_and_model(error: float, records: Path) -> None:
    (model, config), find = tiny_model("llama"), Finding(error)
    for _ in range(2):
        assert remembered("stock", model, config, find) == pytest.approx(error, nan_ok=True) and find.asked == 1
    remembered("replay", model, config, find)
    remembered("stock", *tiny_model("qwen3"), find)
    assert find.asked == 3 and len(list(records.iterdir())) == 3


def test_what_was_not_found_out_is_not_kept(records: Path) -> None:
    find = Finding(None)
    for _ in range(2):
        assert remembered("stock", *tiny_model("llama"), find) is None
    assert find.asked == 2 and not records.exists()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "3", "{}", "\xff", "[" * 100_000]
    + [f'{{"error": {value}}}' for value in ("null", "true", "-1.0", '"0"', "[1]", "{}")],
)
def test_a_damaged_record_is_made_again(text: str, records: Path) -> None:
    model, config = tiny_model("llama")
    remembered("stock", model, config, lambda: 0.5)
    (record,) = records.iterdir()
    whole = record.read_text()
    record.write_bytes(text.encode("latin-1"))
    find = Finding(0.5)
    assert remembered("stock", model, config, find) == 0.5 and find.asked == 1
    assert record.read_text() == whole
