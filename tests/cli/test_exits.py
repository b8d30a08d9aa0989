"""How a command ends when stdout does not take what it writes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import PATIENCE_S, ROOT, SCRIPTED

FULL = Path("/dev/full")
COMMANDS = [["version"], ["sessions", "list"], ["run", "scripted", "hi"], ["chat", "scripted"]]


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def ended(command: list[str], environment: dict[str, str], stdout: int) -> tuple[int, str]:
    done = subprocess.run(
        [*SCRIPTED, *command],
        input=b"hi\n",
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stderr.decode()


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_behind_stdout_is_one_line(
    command: list[str], unbuffered: str, environment: dict[str, str]
) -> None:
    with FULL.open("wb") as full:
        code, told = ended(command, environment | {"PYTHONUNBUFFERED": unbuffered}, full.fileno())
    assert (code, told) == (1, "mlxpaged: stdout cannot be written: No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_closed_pipe_ends_a_command_quietly(
    command: list[str], unbuffered: str, environment: dict[str, str], closed_pipe: int
) -> None:
    assert ended(command, environment | {"PYTHONUNBUFFERED": unbuffered}, closed_pipe) == (0, "")
