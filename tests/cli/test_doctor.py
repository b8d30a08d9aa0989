"""`mlxpaged doctor`: what it says of this machine, what makes it fail, and the file it writes."""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing
from pathlib import Path

import mlx.core as mx
import pytest

from mlxpaged.cli.report_page import as_markdown
from mlxpaged.engine.report import Section
from mlxpaged.model.finding import Finding
from tests.cli.conftest import Program

on_cpu = pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="about the CPU path")


def findings_of(text: str) -> dict[str, dict[str, str]]:
    return {one["name"]: one for one in json.loads(text)["findings"]}


@on_cpu
def test_a_sound_machine_needs_nothing(program: Program) -> None:
    ended = program("doctor", MLXPAGED_BLAS="")
    assert ended.code == 0
    assert "mlx             0.3" in ended.out and "attention       plain MLX: MLX runs on the CPU" in ended.out
    assert "Nothing to do. Start with: mlxpaged chat" in ended.out or "Worth knowing:" in ended.out


@on_cpu
def test_json_names_every_finding_and_says_ok(program: Program, tmp_path: Path) -> None:
    ended = program("doctor", "--json")
    found = findings_of(ended.out)
    assert json.loads(ended.out)["ok"] and ended.code == 0
    assert {"system", "mlxpaged", "mlx", "mlx-lm", "compute", "memory", "BLAS", "encoder limits"} <= set(found)
    assert {"cache folder", "port", "models", "attention"} <= set(found)
    assert found["cache folder"]["value"].startswith(str(tmp_path / "cache"))
    assert found["models"]["value"].startswith("offline, HF_HUB_OFFLINE is set")


def test_a_cache_folder_that_cannot_be_written_is_a_problem(program: Program, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    ended = program("doctor", MLXPAGED_CACHE=str(blocked / "below"))
    assert ended.code == 1
    assert "x cache folder" in ended.out
    assert "To do:\n- cache folder: make" in ended.out and "MLXPAGED_CACHE name another folder" in ended.out


def test_own_folders_that_cannot_be_written_are_problems(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    really = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked and really(path, mode))
    (tmp_path / "file").write_text("")
    variables = {"STATE": locked / "below", "DATA": tmp_path / "file" / "below", "CONFIG": locked}
    ended = program("doctor", **{f"MLXPAGED_{name}": str(folder) for name, folder in variables.items()})
    assert ended.code == 1 and "To do:" in ended.out
    assert f"x state folder    {locked}/below cannot be written: {locked} is read-only" in ended.out
    assert "chat and tui cannot start a server; make" in ended.out and "MLXPAGED_STATE name another" in ended.out
    assert f"x data folder     {tmp_path}/file/below cannot be written: {tmp_path}/file is no folder" in ended.out
    assert f"! config folder   {locked} cannot be written" in ended.out
    assert list(locked.iterdir()) == []


def test_a_port_in_use_is_worth_knowing_and_no_problem(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.socket()) as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        monkeypatch.setattr("mlxpaged.cli.doctor.DEFAULT_PORT", taken)
        found = findings_of(program("doctor", "--json").out)
    assert found["port"]["value"] == f"{taken} is taken" and not found["port"]["problem"]
    assert str(taken) in found["port"]["advice"]


@on_cpu
def test_what_cannot_be_had_is_a_problem_with_its_cure(program: Program) -> None:
    ended = program("doctor", "--attention", "kernel")
    assert ended.code == 1 and "--attention kernel needs a GPU" in ended.out and "use --attention auto" in ended.out
    ended = program("doctor", "no-such-model", "--json")
    found = findings_of(ended.out)
    assert ended.code == 1 and found["model"]["problem"] and "org/name" in found["model"]["advice"]


def test_wrong_flags_end_before_anything_is_measured(program: Program, tmp_path: Path) -> None:
    ended = program("doctor", "--report", str(tmp_path / "missing" / "doctor.md"))
    assert ended.code == 2 and ended.out == "" and "--report" in ended.err and "existing folder" in ended.err
    assert program("doctor", "--attention", "metal").code == 2


@on_cpu
def test_a_report_is_one_file_with_every_section(program: Program, tmp_path: Path) -> None:
    ended = program("doctor", "--report", "doctor.md", "--budget", "30")
    assert ended.code == 0, ended.err
    text = (tmp_path / "doctor.md").read_text()
    document = json.loads(text.partition("```json\n")[2].partition("\n```")[0])
    sections = document["sections"]
    on_a_gpu = [one for name, one in sections.items() if one["status"] == "skipped"]
    assert len(on_a_gpu) == 4 and {one["note"] for one in on_a_gpu} == {"CPU"}
    assert {name for name, one in sections.items() if one["status"] == "failed"} == set()
    rates = sections["Decode against mlx-lm"]["data"]
    assert [one["rows"] for one in rates] == [1, 8] and all(one["ratio"] > 0 for one in rates)
    assert sections["Command buffers of a step (predicted)"]["data"][0]["mlx_lm"] >= 1
    assert sections["Gap between steps"]["data"]["waited_ms"] > 0
    assert document["machine"]["mlx"] == mx.__version__
    assert [one.name for one in tmp_path.iterdir() if "part" in one.name] == []


def test_a_page_survives_bars_infinities_and_line_breaks() -> None:
    section = Section("Part", "ok", {"error": float("inf"), "rows": [{"a|b": "x|y\nz", "n": 1.23456}], "failed": []})
    failed = Section("Other", "failed", {}, "KeyError: 'hidden_size'")
    text = as_markdown([Finding("system", "one|two", None)], [section, failed])
    assert "| system | one/two |  |" in text and "| x/y z | 1.235 |" in text and "- failed: none" in text
    assert "failed: KeyError: 'hidden_size'" in text
    document = json.loads(text.partition("```json\n")[2].partition("\n```")[0])
    assert document["sections"]["Part"]["data"]["error"] == "inf"
