"""A terminal that is closed takes the full-screen app with it, also where no signal tells it so."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mlxpaged.cli import hangup
from tests.cli.conftest import SCRIPTED


def read_until(fd: int, text: bytes, within_s: float) -> bytes:
    seen, deadline = b"", time.monotonic() + within_s
    while text not in seen:
        assert time.monotonic() < deadline, seen[-500:]
        if select.select([fd], [], [], 0.2)[0]:
            seen += os.read(fd, 65536)
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="macOS gives a new session no way to poll a terminal")
def test_the_app_ends_when_its_window_is_closed_without_a_signal(environment: dict[str, str], tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    app = subprocess.Popen(
        [*SCRIPTED, "tui", "scripted"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | {"COLUMNS": "80", "LINES": "24"},
        cwd=tmp_path,
        start_new_session=True,  # the terminal is nobody's: closing it sends no SIGHUP
    )
    os.close(theirs)
    try:
        read_until(ours, b"new session", 60)
        os.close(ours)
        assert app.wait(30) in (0, hangup.HUNG_UP)
    finally:
        app.kill()
        app.wait()


def test_the_watch_asks_to_leave_once_and_only_for_a_hang_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, left = threading.Event(), threading.Event()
    monkeypatch.setattr(hangup, "GRACE_S", 0.01)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    ours, theirs = pty.openpty()
    watch = threading.Thread(target=hangup._watch, args=(left.set, theirs), daemon=True)
    watch.start()
    os.write(ours, b"keys\n")
    watch.join(0.1)
    assert watch.is_alive() and not left.is_set()
    os.close(ours)
    assert left.wait(10) and ended.wait(10)
    os.close(theirs)
