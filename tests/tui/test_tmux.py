"""The app in a real terminal program while eight sessions write: resizes from 40x10 to 200x60, a long block of code,
wide characters, and the way out."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs_tool("tmux")

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60


class Tmux:
    """One tmux server of the test's own with one window."""

    def __init__(self, folder: Path, command: str) -> None:
        self._folder = folder
        there = f"cd {shlex.quote(str(ROOT))}"
        self("new-session", "-d", "-x", "120", "-y", "30", f"{there} && {command}; echo left $?; cat")

    def __call__(self, *args: str) -> str:
        command = ["tmux", "-S", str(self._folder / "tmux"), "-f", "/dev/null", *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout

    def shown(self) -> str:
        return self("capture-pane", "-p")

    def until(self, *texts: str) -> str:
        """Waits for the window to show all `texts` at once; what it shows then."""
        deadline = time.monotonic() + PATIENCE_S
        while any(text not in (shown := self.shown()) for text in texts):
            assert time.monotonic() < deadline, f"{texts} were never shown:\n{shown}"
        return shown

    def keys(self, *keys: str) -> None:
        self("send-keys", *keys)

    def resize(self, columns: int, rows: int) -> None:
        self("resize-window", "-x", str(columns), "-y", str(rows))


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    variables = {
        "PYTHONPATH": str(ROOT),
        "PYTHONUTF8": "1",
        "MLXPAGED_STATE": str(tmp_path),
        "TERM": "screen-256color",
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
    }
    given = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    window = Tmux(tmp_path, f"env -i {given} {shlex.join([sys.executable, '-m', 'tests.tui.program', '40'])}")
    yield window
    window("kill-server")


def test_eight_sessions_write_through_every_resize(tmux: Tmux) -> None:
    tmux.until("A new session", "scripted")
    for number in range(8):
        if number:
            tmux.keys("C-n")
            tmux.until("A new session")
        tmux.keys(f"s{number}", "Enter")
        tmux.until(f"s{number}-3 ")
    tmux.until("8 live", "8 writing")
    for columns, rows in ((40, 10), (200, 60), (40, 10), (80, 24), (200, 60)):
        tmux.resize(columns, rows)
        tmux.until("s7-", "tokens · Esc stops", *(["SESSIONS", "f1 keys"] if columns > 90 else []))
    tmux.until("KV POOL", "8 running")
    tmux.keys("M-8")
    tmux.until("s0-1 s0-2")
    tmux.keys("typed while eight write")
    tmux.until("typed while eight write")
    tmux.keys("C-c")
    tmux.until("■ stopped", "7 live")
    tmux.keys("C-q")
    tmux.until("left 0")


def test_a_long_block_and_wide_characters(tmux: Tmux) -> None:
    tmux.until("A new session", "scripted")
    tmux.keys("fence", "Enter")
    tmux.until("1 live", "line", "Esc stops")
    tmux.keys("seen")
    tmux.until("seen")
    tmux.keys("C-n")
    tmux.until("A new session")
    tmux.keys("mixed", "Enter")
    shown = tmux.until("日本語 🎉", "漢", "ttft")
    assert "␛[31mred␛]0;owned␇" in shown and "owned" not in tmux("display-message", "-p", "#{pane_title}")
    tmux.keys("M-2")
    tmux.until("The end.", "line1999 = 1999", "ttft")
    tmux("set-buffer", "".join(f"pasted {number}\n" for number in range(500)))
    tmux.keys("C-c")
    tmux("paste-buffer", "-p")
    tmux.until("[pasted #1: 501 lines]")
    tmux.keys("C-q")
    tmux.until("left 0")
