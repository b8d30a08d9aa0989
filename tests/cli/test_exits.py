"""How a command ends when stdout does not take what it writes, or when a stream is missing."""

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


def without(closed: str, command: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """The end of a command that a shell starts without one of its streams: exit code, stdout, stderr."""
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *SCRIPTED, *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        cwd=ROOT,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    "command",
    [["--help"], ["version"], ["config", "path"], ["ps"], ["sessions", "list"], ["run", "scripted", "hi"]],
    ids=" ".join,
)
def test_a_command_without_a_stdout_says_so_in_one_line(command: list[str], environment: dict[str, str]) -> None:
    assert without(">&-", command, environment) == (1, "", "mlxpaged: stdout cannot be written: it is closed\n")


def test_a_command_that_prints_nothing_needs_no_stdout(environment: dict[str, str]) -> None:
    code, out, err = without(">&-", ["config", "set", "temperature", "0.5"], environment)
    assert (code, out, err) == (0, "", "")


def test_a_command_without_a_stderr_keeps_its_complaints_off_stdout(environment: dict[str, str]) -> None:
    assert without("2>&-", ["run", "scripted", "hi"], environment) == (0, "You said: hi\n", "")
    assert without("2>&-", ["run", "missing", "hi"], environment) == (3, "", "")
    assert without(">&- 2>&-", ["run", "scripted", "hi"], environment) == (1, "", "")


def test_a_command_without_a_stdin_reads_nothing(environment: dict[str, str]) -> None:
    assert without("<&-", ["run", "scripted", "hi"], environment) == (0, "You said: hi\n", "")
    code, out, err = without("<&-", ["run", "scripted"], environment)
    assert (code, out) == (2, "") and "the prompt is empty" in err and err.count("\n") == 1


@pytest.mark.parametrize("group", ["bench", "config", "sessions"])
def test_a_group_without_a_command_shows_its_help(group: str, environment: dict[str, str]) -> None:
    code, told = ended([group], environment, subprocess.DEVNULL)
    assert code == 2 and told.startswith(f"Usage: mlxpaged {group} [OPTIONS] COMMAND") and "\nCommands:\n" in told
