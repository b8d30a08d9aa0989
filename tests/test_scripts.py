"""scripts/run: what it says when it cannot work, and that a finished environment is used at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the scripts and a pyproject.toml, nothing installed."""
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    for name in ("run", "test", "venv.sh"):
        shutil.copy(SCRIPTS / name, root / "scripts" / name)
    (root / "pyproject.toml").write_text("[project]\nname = 'mlxpaged'\n")
    return root


def run(root: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(root / "scripts" / "run"), *args],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], **variables},
        cwd=root.parent,
        timeout=60,
        check=False,
    )


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def installed(root: Path) -> None:
    """An environment as a finished install leaves it; its mlxpaged shows its arguments and folder."""
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "python").symlink_to(sys.executable)
    program(root / ".venv" / "bin" / "mlxpaged", 'printf "%s|" "$PWD" "$@"')
    checksum = subprocess.run(
        ["cksum"], stdin=(root / "pyproject.toml").open(), capture_output=True, text=True, check=True
    )
    (root / ".venv" / "stamp-run").write_text(f"{checksum.stdout.strip()} {root}\n")


def test_without_a_usable_python_it_names_what_it_found_and_needs(checkout: Path, tmp_path: Path) -> None:
    program(tmp_path / "old", '[[ "$2" == *print* ]] && echo "/usr/bin/python3 3.9.6 on x86_64" && exit 0; exit 1')
    done = run(checkout, MLXPAGED_PYTHON=str(tmp_path / "old"))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("mlxpaged: needs Python 3.11 or newer")
    assert "found /usr/bin/python3 3.9.6 on x86_64" in done.stderr and "MLXPAGED_PYTHON=" in done.stderr
    missing = run(checkout, MLXPAGED_PYTHON="no-such-python")
    assert missing.returncode == 1 and "found no no-such-python" in missing.stderr


def test_a_python_without_venv_is_told_how_to_get_it(checkout: Path, tmp_path: Path) -> None:
    program(tmp_path / "bare", '[[ "$1" == -c ]] && exit 0; exit 1')
    done = run(checkout, MLXPAGED_PYTHON=str(tmp_path / "bare"))
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr


def test_a_finished_environment_is_used_at_once_from_the_callers_folder(checkout: Path) -> None:
    installed(checkout)
    done = run(checkout, "run", "my model.gguf", "two words")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{checkout.parent}|run|my model.gguf|two words|"


def test_no_arguments_mean_chat(checkout: Path) -> None:
    installed(checkout)
    assert run(checkout).stdout == f"{checkout.parent}|chat|"


def test_a_changed_pyproject_is_installed_again(checkout: Path, tmp_path: Path) -> None:
    installed(checkout)
    (checkout / ".venv" / "root").write_text(f"{checkout}\n")
    (checkout / "pyproject.toml").write_text("[project]\nname = 'mlxpaged'\nversion = '2'\n")
    (checkout / ".venv" / "bin" / "python").unlink()
    program(checkout / ".venv" / "bin" / "python", f'[[ "$1" == -c ]] && exit 0; echo "$@" >>"{tmp_path}/calls"')
    assert run(checkout).returncode == 0
    assert (tmp_path / "calls").read_text() == f"-m pip install --quiet --editable {checkout}\n"
    assert run(checkout).returncode == 0
    assert (tmp_path / "calls").read_text().count("\n") == 1


def test_a_failed_install_leaves_no_stamp(checkout: Path) -> None:
    installed(checkout)
    (checkout / ".venv" / "root").write_text(f"{checkout}\n")
    (checkout / ".venv" / "stamp-run").unlink()
    (checkout / ".venv" / "bin" / "python").unlink()
    program(checkout / ".venv" / "bin" / "python", '[[ "$1" == -c ]] && exit 0; exit 1')
    done = run(checkout)
    assert done.returncode == 1 and "the install failed" in done.stderr
    assert not (checkout / ".venv" / "stamp-run").exists()


@pytest.mark.parametrize("script", ["run", "test", "venv.sh", "../.ci/run"])
def test_every_script_is_valid_bash(script: str) -> None:
    subprocess.run(["bash", "-n", str(SCRIPTS / script)], check=True, timeout=20)
