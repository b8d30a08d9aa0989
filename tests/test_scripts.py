"""scripts/run: what it says when it cannot work, and that a finished environment is used at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pexpect
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
    assert (tmp_path / "calls").read_text() == f"-m pip install --progress-bar off --editable {checkout}\n"
    assert run(checkout).returncode == 0
    assert (tmp_path / "calls").read_text().count("\n") == 1


def to_install(checkout: Path, pip: str) -> None:
    """An environment that lacks the package, and whose pip is a line of bash."""
    installed(checkout)
    (checkout / ".venv" / "root").write_text(f"{checkout}\n")
    (checkout / ".venv" / "stamp-run").unlink()
    (checkout / ".venv" / "bin" / "python").unlink()
    program(checkout / ".venv" / "bin" / "python", f'[[ "$1" == -c ]] && exit 0; {pip}')


SETTING_UP = "mlxpaged: setting up .venv (once; a minute or two, more on a slow line)\n"


def test_an_install_is_one_line(checkout: Path) -> None:
    to_install(checkout, "echo Collecting mlx; echo a warning >&2")
    done = run(checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{checkout.parent}|chat|", SETTING_UP)


def test_a_failed_install_tells_all_that_pip_said_and_leaves_no_stamp(checkout: Path) -> None:
    to_install(checkout, "echo Collecting mlx; echo no space left >&2; exit 1")
    done = run(checkout)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"{SETTING_UP}Collecting mlx\nno space left\n"
        "mlxpaged: the install failed (above); run the same command again once the cause is gone\n"
    )
    assert not (checkout / ".venv" / "stamp-run").exists()


def on_terminal(checkout: Path) -> pexpect.spawn:
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm"}
    script = str(checkout / "scripts" / "run")
    return pexpect.spawn("bash", [script], env=environment, cwd=str(checkout.parent), timeout=60)


def test_on_a_terminal_an_install_shows_that_it_goes_on_and_clears_that_away(checkout: Path, tmp_path: Path) -> None:
    to_install(checkout, f"echo '  Downloading mlx'; while [[ ! -e '{tmp_path}/go' ]]; do sleep 0.05; done")
    shown = on_terminal(checkout)
    shown.expect_exact("  1 s  Downloading mlx")
    (tmp_path / "go").touch()
    shown.expect_exact(f"\r\x1b[K{checkout.parent}|chat|")
    shown.expect(pexpect.EOF)
    shown.close()
    assert shown.exitstatus == 0


def test_control_c_ends_an_install_and_what_is_shown_of_it(checkout: Path) -> None:
    to_install(checkout, "echo Collecting mlx; exec sleep 60")
    shown = on_terminal(checkout)
    shown.expect_exact("Collecting mlx")
    shown.sendintr()
    shown.expect(pexpect.EOF)
    shown.close()
    assert (shown.exitstatus, shown.signalstatus) in {(130, None), (None, signal.SIGINT)}
    assert not (checkout / ".venv" / "stamp-run").exists()


@pytest.mark.parametrize("script", ["run", "test", "venv.sh", "../.ci/run"])
def test_every_script_is_valid_bash(script: str) -> None:
    subprocess.run(["bash", "-n", str(SCRIPTS / script)], check=True, timeout=20)
