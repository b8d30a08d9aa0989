"""The kernel scripts, on the emulator: what they print and how they exit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator import require_tools

ROOT = Path(__file__).resolve().parents[2]


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    require_tools()
    command = [sys.executable, str(ROOT / "scripts" / name), "--launcher", "tests.emulator:EmulatorLauncher"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_check_kernels_prints_a_line_a_case_and_a_table() -> None:
    done = run_script("check_kernels.py", "--only", "copy float32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("3 cases on EmulatorLauncher")
    assert done.stdout.count("\nok ") == 3
    assert done.stdout.splitlines()[-1].split() == ["copy", "float32", "3", "0", "0.0e+00", "0.0e+00"]


def test_check_kernels_runs_one_part_of_the_grid() -> None:
    done = run_script("check_kernels.py", "--only", "copy", "--part", "2/4", "--quiet")
    assert done.stdout.startswith("2 cases") and "\nok" not in done.stdout


def test_check_kernels_ends_a_case_that_takes_too_long() -> None:
    done = run_script("check_kernels.py", "--only", "order", "--limit", "0.001")
    assert done.returncode == 1
    assert "Timeout" in done.stderr


@pytest.mark.parametrize(("bits", "splits"), [(16, "1x2"), (4, "2x1,4x1")])
def test_bench_products_prints_json_and_a_table(bits: int, splits: str) -> None:
    shape = ("--shapes", "128x64", "--rows", "3,9", "--megabytes", "1", "--repeats", "1")
    done = run_script("bench_products.py", *shape, "--bits", str(bits), "--splits", splits)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, _, head, first, second = done.stdout.splitlines()
    ways = ["mlx", *(f"{split.replace('x', ' tiles x ')}" for split in splits.split(","))]
    assert [json.loads(line)["rows"] for line in lines] == [3, 9]
    assert all(list(json.loads(line)["us"]) == ways for line in lines)
    assert all(way in head for way in ways) and first.count("*") == second.count("*") == 1


def test_bench_kernels_prints_json_and_a_table() -> None:
    done = run_script("bench_kernels.py", "--only", "w64 B1 ctx 512", "--chain", "1", "--repeats", "1", "--skip-peers")
    assert done.returncode == 0, done.stdout + done.stderr
    _, line, *_, table = done.stdout.splitlines()
    assert json.loads(line)["case"] == "w64 B1 ctx 512"
    assert table.startswith("w64 B1 ctx 512") and table.count(" -") == 3
