"""The small process that holds a server's listening sockets. Owns the serving child: its start, its signals, its end,
and what is said about that; answers no request and imports nothing heavy.

A GPU's failed command buffer can end a whole process (MLX throws on a thread of Metal's own, where nobody catches). The
parent then starts another child on the same sockets: clients that connect meanwhile wait in their backlog.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import FrameType

_VARIABLE = "MLXPAGED_PARENT"
_TAIL_BYTES = 4096
_LAST_WORDS_S = 2.0
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_NO_MEMORY = ("insufficient memory", "out of memory", "outofmemory", "unable to allocate", "bad_alloc", "cuda error 2")


@dataclass(frozen=True, slots=True)
class Handed:
    """What a child gets from its parent, as one line through a pipe that stays open as long as the parent lives.
    `pid` is the parent's; `sockets` and `stderr` are file descriptors; `kv_share`: the part of the KV budget to use."""

    pid: int
    sockets: tuple[int, ...]
    stderr: int
    secret: str = field(repr=False)
    kv_share: float = 1.0
    alive: int = -1  # readable once the parent has ended

    def opened(self) -> list[socket.socket]:
        """The listening sockets."""
        return [socket.socket(fileno=fd) for fd in self.sockets]


def handed() -> Handed | None:
    """In a child: what its parent hands over, once. None in a process that has no such parent.

    What this process writes to stderr goes where it always went. What others write there (the C++ runtime's last
    words) goes through the parent, which passes it on and learns from it why the child ended.
    """
    variable = os.environ.pop(_VARIABLE, None)
    if variable is None:
        return None
    alive = int(variable)
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(alive, 1)
        if not piece:
            sys.exit(1)  # the parent ended before it had said anything
        line += piece
    told = json.loads(line)
    given = Handed(**(told | {"sockets": tuple(told["sockets"]), "alive": alive}))
    for fd in (alive, given.stderr, *given.sockets):
        os.set_inheritable(fd, False)
    sys.stderr = os.fdopen(given.stderr, "w", buffering=1, errors="backslashreplace")
    return given


class Restarts:
    """Counts abnormal ends: the third within ten minutes is one too many."""

    def __init__(self, most: int = 3, within_s: float = 600.0) -> None:
        self.most = most
        self._within_s = within_s
        self._ends: deque[float] = deque()

    def again(self, now: float) -> int:
        """One more end at `now` (seconds): how many of late; at `most` there should be no other start."""
        self._ends.append(now)
        while now - self._ends[0] > self._within_s:
            self._ends.popleft()
        return len(self._ends)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a child ended: its code as subprocess tells it, and the last it wrote to the C-level stderr."""

    code: int
    words: str

    @property
    def abnormal(self) -> bool:
        """By a signal: whatever ends by itself says why and means it."""
        return self.code < 0

    @property
    def out_of_memory(self) -> bool:
        """Its last words tell."""
        words = self.words.lower()
        return any(phrase in words for phrase in _NO_MEMORY)

    @property
    def perhaps_out_of_memory(self) -> bool:
        """Linux kills what takes too much, but so may anybody, and no words are left."""
        return self.code == -signal.SIGKILL and not self.out_of_memory

    @property
    def reason(self) -> str:
        name = signal.Signals(-self.code).name if -self.code in signal.valid_signals() else f"signal {-self.code}"
        lines = [line.strip() for line in self.words.splitlines() if line.strip()]
        return f"{name}: {lines[-1][:200]}" if lines else name


class Parent:
    """Runs `command` as a child over `sockets` until it ends by itself, is told to end, or fails too often."""

    def __init__(
        self, command: Sequence[str], sockets: Sequence[socket.socket], secret: str, say: Callable[[str], None]
    ) -> None:
        self._command = tuple(command)
        self._sockets = tuple(sockets)
        self._secret = secret
        self._say = say
        self._child: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []  # to end, as they came
        self._unsent: list[int] = []  # those that came while there was no child
        self._kv_share = 1.0

    def run(self, restarts: Restarts | None = None, clock: Callable[[], float] = time.monotonic) -> int:
        """The exit code: the child's, or 1 when it failed too often."""
        restarts = restarts or Restarts()
        self._catch_signals()
        while True:
            ending = self._one_life()
            if not ending.abnormal:
                return ending.code
            if self._signals:
                return 0 if -ending.code in self._signals else 1
            count = restarts.again(clock())
            if count >= restarts.most:
                self._say(f"the serving process ended by {ending.reason}, {count} times in a few minutes; giving up")
                return 1
            said = f"the serving process ended by {ending.reason}"
            if ending.perhaps_out_of_memory:
                said += ", perhaps for lack of memory"
            said += "; starting it again"
            if ending.out_of_memory or ending.perhaps_out_of_memory:
                self._kv_share /= 2
                said += f" with {self._kv_share:.0%} of the K/V budget; "
                said += "if memory ran out, " if ending.perhaps_out_of_memory else ""
                said += "a lower --memory-budget or --ctx helps"
            self._say(said)

    def _one_life(self) -> Ending:
        words = bytearray()
        spoken, speaking = os.pipe()
        reading, alive = os.pipe()
        stderr = os.dup(2)
        fds = tuple(bound.fileno() for bound in self._sockets)
        with os.fdopen(alive, "wb", buffering=0) as pipe:
            self._child = subprocess.Popen(
                self._command,
                stderr=speaking,
                pass_fds=(reading, stderr, *fds),
                env={**os.environ, _VARIABLE: str(reading)},
                process_group=0,  # a terminal's Ctrl-C comes to the parent alone, which passes it on: once
            )
            for fd in (speaking, reading, stderr):
                os.close(fd)
            tee = threading.Thread(target=_pass_on, args=(spoken, words), daemon=True)
            tee.start()
            given = asdict(Handed(os.getpid(), fds, stderr, self._secret, self._kv_share)) | {"alive": -1}
            with suppress(BrokenPipeError):  # it ended already; its code says how
                pipe.write(json.dumps(given).encode() + b"\n")
            while self._unsent:
                self._pass(self._unsent.pop(0))
            code = self._child.wait()
            tee.join(_LAST_WORDS_S)
        return Ending(code, bytes(words).decode(errors="replace"))

    def _catch_signals(self) -> None:
        for number in _ENDINGS:
            signal.signal(number, self._end)
        signal.signal(signal.SIGTSTP, self._stop)
        signal.signal(signal.SIGCONT, self._go_on)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if not self._pass(number):
            self._unsent.append(number)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._pass(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _go_on(self, number: int, frame: FrameType | None) -> None:
        self._pass(signal.SIGCONT)

    def _pass(self, number: int) -> bool:
        if self._child is None or self._child.returncode is not None:
            return False
        self._child.send_signal(number)
        return True


def _pass_on(pipe: int, words: bytearray) -> None:
    """Copies a pipe to stderr until its end, keeping the last of it."""
    while data := os.read(pipe, _TAIL_BYTES):
        os.write(2, data)
        words += data
        del words[:-_TAIL_BYTES]
    os.close(pipe)
