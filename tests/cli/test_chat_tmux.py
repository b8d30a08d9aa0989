"""`mlxpaged chat` in a real terminal program: what tmux shows after keys, a paste and a Ctrl-C in mid-reply."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import PATIENCE_S, ROOT, SCRIPTED

pytestmark = pytest.mark.needs_tool("tmux")


class Tmux:
    """One tmux server of the test's own with one window of 80 by 24."""

    def __init__(self, folder: Path, command: str, environment: dict[str, str]) -> None:
        self._folder = folder
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
        there = f"cd {shlex.quote(str(ROOT))}"
        self("new-session", "-d", "-x", "80", "-y", "24", f"{there} && env {variables} {command}; echo left $?; cat")

    def __call__(self, *args: str) -> str:
        command = ["tmux", "-S", str(self._folder / "tmux"), "-f", "/dev/null", *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout

    def until(self, text: str) -> str:
        """Waits for the window to show `text`; what it shows then, scrollback included."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in (shown := self("capture-pane", "-p", "-S", "-200")):
            assert time.monotonic() < deadline, f"{text!r} was never shown:\n{shown}"
        return shown

    def keys(self, *keys: str) -> None:
        self("send-keys", *keys)


@pytest.fixture
def tmux(tmp_path: Path, environment: dict[str, str]) -> Iterator[Tmux]:
    window = Tmux(tmp_path, f"{shlex.join(SCRIPTED)} chat scripted", environment | {"TERM": "screen-256color"})
    yield window
    window("kill-server")


def test_a_chat_from_the_first_key_to_the_last(tmux: Tmux) -> None:
    tmux.until("/help for commands")
    tmux.keys("stall", "Enter")
    tmux.until("Once upon a time")
    tmux.keys("C-c")
    tmux.until("· stopped")
    tmux("set-buffer", "show\nline two\nline three\n")
    tmux("paste-buffer", "-p")
    assert "PROMPT" not in tmux.until("... line three")
    tmux.keys("Enter")
    shown = " ".join(tmux.until("PROMPT").split())
    assert "Once upon a time" in shown
    tmux.until("/help for commands")
    tmux.keys("C-d")
    tmux.until("left 0")
