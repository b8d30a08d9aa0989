"""What the full-screen app costs: time from a key to its echo while sessions stream, and the processor while idle.

Runs the app in a pseudo-terminal over a scripted engine at a steady pace, types one key at a time and waits until the
terminal is given it back. Prints one JSON line. Reported, not asserted: it depends on the machine and its load.

    python scripts/bench_tui.py [--sessions 8] [--rate 40] [--keys 100]
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pyte

ROOT = Path(__file__).resolve().parent.parent
ROWS, COLUMNS = 40, 140
PATIENCE_S = 30.0
KEY_EVERY_S = 0.08
IDLE_S = 10.0


class Screen:
    """The app, started by `command`, in a pseudo-terminal of `size` (columns, rows); `shown` is what a person would
    see."""

    def __init__(self, command: Sequence[str], folder: str, size: tuple[int, int] = (COLUMNS, ROWS)) -> None:
        import fcntl
        import termios

        self._fd, other = pty.openpty()
        columns, rows = size
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "PYTHONPATH": str(ROOT),
            "PYTHONUTF8": "1",
            "MLXPAGED_STATE": folder,
        }
        self.process = subprocess.Popen(
            command,
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        os.close(other)
        self.last_read = 0.0
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def shown(self) -> str:
        """The screen's rows."""
        return "\n".join(self._screen.display)

    def type(self, keys: str) -> None:
        """Sends keys."""
        os.write(self._fd, keys.encode())

    def until(self, text: str) -> float:
        """Reads until `text` is on the screen; the time when the bytes that brought it were there."""
        deadline = time.monotonic() + PATIENCE_S
        now = time.monotonic()
        while text not in self.shown:
            self.read(deadline - time.monotonic())
            now = time.monotonic()
            if now > deadline:
                raise SystemExit(f"{text!r} was never shown:\n{self.shown}")
        return now

    def read(self, timeout_s: float, drawn: bool = True) -> bytes:
        """What came within `timeout_s`; not `drawn`, it is only taken: a terminal costs less than one in Python."""
        if not select.select([self._fd], [], [], max(timeout_s, 0))[0]:
            return b""
        data = os.read(self._fd, 1 << 16)
        self.last_read = time.monotonic()
        if drawn:
            self._stream.feed(data)
        return data

    def drain(self, for_s: float, drawn: bool = True) -> None:
        """Reads all that comes for a while."""
        end = time.monotonic() + for_s
        while (left := end - time.monotonic()) > 0:
            self.read(left, drawn)

    def share(self, process: psutil.Process, for_s: float, drawn: bool = True) -> float:
        """The process's part of one core over a while."""
        before = process.cpu_times()
        self.drain(for_s, drawn)
        after = process.cpu_times()
        return (after.user + after.system - before.user - before.system) / for_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=8, help="sessions that write at once")
    parser.add_argument("--rate", type=float, default=40.0, help="steps per second; each gives every session a word")
    parser.add_argument("--keys", type=int, default=100, help="keys to type")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        screen = Screen([sys.executable, "-m", "tests.tui.program", str(flags.rate)], folder)
        try:
            print(json.dumps(_measure(screen, flags.sessions, flags.keys)))
        finally:
            screen.process.kill()
            screen.process.wait()


def _measure(screen: Screen, sessions: int, keys: int) -> dict[str, float]:
    start_s = time.monotonic()
    start_s = screen.until("Ask anything") - start_s
    process = psutil.Process(screen.process.pid)
    screen.drain(2.0)
    idle = screen.share(process, IDLE_S)
    for number in range(sessions):
        if number:
            screen.type("\x0e")
            screen.until("A new session")
        screen.type(f"s{number}\r")
        screen.until(f"s{number}-3 ")
    echoes = sorted(_echo(screen, key) for key in _letters(keys))
    busy = screen.share(process, IDLE_S)
    return {
        "sessions": sessions,
        "start_s": round(start_s, 3),
        "echo_p50_ms": round(1000 * echoes[len(echoes) // 2], 1),
        "echo_p95_ms": round(1000 * echoes[int(len(echoes) * 0.95)], 1),
        "echo_max_ms": round(1000 * echoes[-1], 1),
        "streaming_cpu": round(busy, 4),
        "idle_cpu": round(idle, 4),
    }


def _letters(count: int) -> list[str]:
    """Single characters that the replies never hold, so that seeing one is its echo."""
    return [chr(0x100 + number) for number in range(count)]


def _echo(screen: Screen, key: str) -> float:
    """Seconds from the key to the bytes that show it."""
    screen.drain(KEY_EVERY_S)
    sent = time.monotonic()
    screen.type(key)
    while key.encode() not in screen.read(PATIENCE_S):  # in the bytes: drawing them here would count as the app's time
        if time.monotonic() - sent > PATIENCE_S:
            raise SystemExit(f"the key {key!r} was never shown")
    return screen.last_read - sent


if __name__ == "__main__":
    main()
