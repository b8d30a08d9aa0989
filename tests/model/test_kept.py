"""What is remembered about models: aliases that resolve, downloads that are ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlxpaged.errors import ConfigError
from mlxpaged.model import kept
from mlxpaged.model.installed import known_models
from mlxpaged.model.sources import resolve


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXPAGED_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_an_alias_resolves_is_known_and_goes(tmp_path: Path) -> None:
    (tmp_path / "own.gguf").write_bytes(b"GGUF")
    kept.set_alias("mine", str(tmp_path / "own.gguf"))
    assert resolve("mine").path == tmp_path / "own.gguf"
    assert known_models([], tmp_path / "no-cache")[-1] == "mine"
    kept.drop_alias("mine")
    assert kept.aliases() == {}


def test_a_damaged_file_is_as_good_as_none_and_an_unwritable_one_is_said(data: Path) -> None:
    data.mkdir()
    kept.kept_path().write_text("[1, ")
    assert kept.aliases() == kept.downloaded() == {}
    kept.note_downloaded("org/one", "2026-01-01")
    assert kept.downloaded() == {"org/one": "2026-01-01"}
    kept.kept_path().unlink()
    for file in data.iterdir():
        file.unlink()
    data.rmdir()
    data.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="MLXPAGED_DATA names another folder"):
        kept.set_alias("x", "smollm2")


def test_two_processes_lose_nothing(data: Path) -> None:
    code = "from mlxpaged.model.kept import set_alias\nfor n in range(50): set_alias(f'there-{n}', 'smollm2')"
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        for number in range(50):
            kept.set_alias(f"here-{number}", "smollm2")
        assert other.wait(60) == 0
    assert set(kept.aliases()) == {f"{place}-{number}" for place in ("here", "there") for number in range(50)}
