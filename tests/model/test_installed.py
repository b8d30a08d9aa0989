"""Which names are on disk: whole snapshots of the main revision, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpaged.model.installed import installed_models, known_models


@pytest.fixture(autouse=True)
def no_smollm2(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path / "none"))


def cached(hub: Path, repository: str, *files: str, revision: str = "abc", main: str | None = "abc") -> None:
    folder = hub / repository
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for name in files:
        (snapshot / name).write_text("{}")
    if main:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(main)


WHOLE = ("config.json", "model.safetensors", "tokenizer.json")


def test_a_whole_snapshot_is_a_name_and_anything_less_is_not(tmp_path) -> None:
    cached(tmp_path, "models--org--whole-1B", *WHOLE)
    cached(tmp_path, "models--org--a--b", *WHOLE, main=None)
    cached(tmp_path, "models--org--torch", "config.json", "pytorch_model.bin", "tokenizer.json")
    cached(tmp_path, "models--org--half", "config.json", "tokenizer.json")
    cached(tmp_path, "models--org--old", *WHOLE, revision="abc", main="def")
    cached(tmp_path, "datasets--org--data", *WHOLE)
    (tmp_path / "stray").write_text("")
    assert installed_models(tmp_path) == ["org/a--b", "org/whole-1B"]


def test_listed_names_come_first_and_once(tmp_path) -> None:
    cached(tmp_path, "models--org--whole-1B", *WHOLE)
    assert known_models(["./mine.gguf", "org/whole-1B"], tmp_path) == ["./mine.gguf", "org/whole-1B"]


def test_no_cache_folder_is_no_models(tmp_path) -> None:
    assert installed_models(tmp_path / "absent") == []
