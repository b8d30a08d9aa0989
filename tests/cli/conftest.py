"""The program as a person meets it: a process with pipes, or one in a terminal whose screen can be read."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pexpect
import psutil
import pyte
import pytest

from mlxpaged.chat.servers import ServerRecord, records
from mlxpaged.cli import compose
from mlxpaged.cli.app import run_command_line
from tests.cli.program import scripted_chat, scripted_engine

ROOT = Path(__file__).resolve().parents[2]
SCRIPTED = (sys.executable, "-m", "tests.cli.program")
REAL = (sys.executable, "-m", "mlxpaged")
PATIENCE_S = 60


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code and all it wrote."""

    code: int
    out: str
    err: str


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose home and folders are the test's own."""
    kept = {name: value for name, value in os.environ.items() if name in {"PATH", "LANG", "LD_LIBRARY_PATH"}}
    folders = {f"MLXPAGED_{name}": str(tmp_path / name.lower()) for name in ("STATE", "CACHE", "DATA", "CONFIG")}
    return {
        **kept,
        **folders,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "PYTHONUTF8": "1",
        "TERM": "xterm-256color",
        "HF_HUB_OFFLINE": "1",
    }


Program = Callable[..., Ended]


@pytest.fixture
def program(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Runs `mlxpaged ARGS` in this process, over the scripted engine (real=True: over the real one)."""

    def run(*args: str, stdin: str | bytes = "", real: bool = False, **variables: str) -> Ended:
        streams = [io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin), io.BytesIO(), io.BytesIO()]
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            for name, value in (environment | variables).items():
                patch.setenv(name, value)
            for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
                patch.setattr(sys, name, io.TextIOWrapper(stream, encoding="utf-8", write_through=True))
            if not real:
                patch.setattr(compose, "started_engine", scripted_engine)
                patch.setattr(compose, "opened_for_chat", scripted_chat)
            code = run_command_line(args)
            return Ended(code, streams[1].getvalue().decode(), streams[2].getvalue().decode())

    return run


@pytest.fixture
def process(environment: dict[str, str], tmp_path: Path) -> Program:
    """The same in a process of its own."""

    def run(*args: str, stdin: str | bytes = "", real: bool = False, **variables: str) -> Ended:
        done = subprocess.run(
            [*(REAL if real else SCRIPTED), *args],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            env=environment | variables,
            cwd=tmp_path,
            timeout=240 if real else PATIENCE_S,
            check=False,
        )
        return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


def kill_server(pid: int) -> None:
    """SIGKILL for a server and the process that serves for it, in one blow: nobody drains, nobody starts another."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        parent.suspend()
        for process in (*parent.children(recursive=True), parent):
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def servers(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[ServerRecord]]]:
    """The servers that faces of this test started; whatever is left of them is ended."""
    monkeypatch.setenv("MLXPAGED_STATE", environment["MLXPAGED_STATE"])
    yield records
    for record in records():
        kill_server(record.pid)


class Terminal:
    """The program in a terminal: keys go in, the screen (scrollback included) comes out."""

    def __init__(self, command: list[str], environment: dict[str, str], cwd: Path, size: tuple[int, int]) -> None:
        rows, columns = size
        self._screen = pyte.HistoryScreen(columns, rows, history=1000, ratio=1)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        self._process = pexpect.spawn(
            command[0], command[1:], env=environment, cwd=str(cwd), dimensions=size, timeout=PATIENCE_S
        )

    def type(self, keys: str) -> None:
        self._process.send(keys)

    def until(self, text: str, count: int = 1) -> str:
        """Reads until the screen shows `text` `count` times, then gives it; fails the test when it never does."""
        while self.count(text) < count:
            try:
                self._take(self._process.read_nonblocking(65536, timeout=PATIENCE_S))
            except (pexpect.TIMEOUT, pexpect.EOF) as error:
                said = f"{type(error).__name__} before {text!r} was shown {count} times"
                pytest.fail(f"{said}; the screen:\n{self.text()}")
        return self.text()

    def count(self, text: str) -> int:
        """How often `text` stands on the screen, also where the terminal broke it at its edge, in or between words."""
        shown = self.text()
        return max(lines.count(text) for lines in (shown, shown.replace("\n", ""), shown.replace("\n", " ")))

    def until_true(self, holds: Callable[[], bool]) -> None:
        """Reads on until something outside the screen is true; fails the test when it never is."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"still not true; the screen:\n{self.text()}"
            with suppress(pexpect.TIMEOUT):
                self._take(self._process.read_nonblocking(65536, timeout=0.1))

    def kill(self) -> None:
        """SIGKILL: no handler and no clean-up of the program's own runs."""
        self._process.kill(signal.SIGKILL)
        self._process.wait()

    def text(self) -> str:
        """Scrollback and screen, without trailing blanks."""
        width = self._screen.columns
        above = ["".join(line[column].data for column in range(width)) for line in self._screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self._screen.display]).rstrip()

    def ended(self) -> int:
        """Reads to the end; the exit code."""
        try:
            while True:
                self._take(self._process.read_nonblocking(65536, timeout=PATIENCE_S))
        except pexpect.EOF:
            self._process.close()
        return int(self._process.exitstatus if self._process.exitstatus is not None else -self._process.signalstatus)

    def close(self) -> None:
        self._process.close(force=True)

    def _take(self, data: bytes) -> None:
        self.raw += data
        self._stream.feed(data)
        if b"\x1b[6n" in data:  # the line editor asks where the cursor is, and a terminal answers
            self._process.send(f"\x1b[{self._screen.cursor.y + 1};{self._screen.cursor.x + 1}R")


@pytest.fixture
def terminal(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Opens `mlxpaged ARGS` over the scripted engine in a terminal of 30 rows and 80 columns."""
    opened: list[Terminal] = []

    def open_one(
        *args: str, size: tuple[int, int] = (30, 80), command: tuple[str, ...] = SCRIPTED, **variables: str
    ) -> Terminal:
        opened.append(Terminal([*command, *args], environment | variables, tmp_path, size))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()
