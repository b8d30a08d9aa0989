"""The process that holds the sockets: what it hands over, when it starts another child, what it passes on and says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlxpaged.server.parent import Ending, Restarts
from tests.cli.conftest import PATIENCE_S, ROOT

PARENT = """
import sys
from mlxpaged.server.listening import listen
from mlxpaged.server.parent import Parent
sockets = listen("127.0.0.1", 0)
print(sockets[0].getsockname()[1], flush=True)
say = lambda text: print("said:", text, flush=True)
code = Parent([sys.executable, "-c", sys.argv[1]], sockets, "5ec4e7", say).run()
heavy = sorted({"mlx", "mlx_lm", "numpy", "uvicorn", "starlette", "httpx", "psutil", "asyncio"} & set(sys.modules))
print("heavy:", heavy, flush=True)
sys.exit(code)
"""

CHILD = """
import os, signal, sys
from mlxpaged.server.parent import handed
given = handed()
(listening,) = given.opened()
while True:
    connection, _ = listening.accept()
    match connection.recv(100).decode():
        case "who": answer = f"{os.getpid()} {os.getppid()} {given.pid} {given.secret} {given.kv_share}"
        case "abort": os.write(2, b"terminating: Insufficient Memory\\n"); os.abort()
        case "kill": os.kill(os.getpid(), signal.SIGKILL)
        case "segv": os.kill(os.getpid(), signal.SIGSEGV)
        case "leave": print("the child's own words", file=sys.stderr); sys.exit(3)
        case "wait": answer = str(os.read(given.alive, 1))
    connection.sendall(answer.encode())
    connection.close()
"""


class Held:
    """A parent over CHILD, and questions to whichever child answers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.port = int(self.line())

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ask(self, word: str) -> str:
        """The answer; empty where the child ends instead."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as connection:
            connection.sendall(word.encode())
            try:
                return connection.recv(1000).decode()
            except ConnectionResetError:
                return ""


@contextmanager
def held(child: str = CHILD) -> Iterator[Held]:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, textwrap.dedent(child)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
    ) as process:
        try:
            yield Held(process)
        finally:
            process.terminate()  # not kill: these children do not look whether their parent lives


def test_a_child_gets_sockets_secret_and_share_and_the_parent_stays_light() -> None:
    with held() as parent:
        child, its_parent, pid, secret, share = parent.ask("who").split()
        assert (int(its_parent), int(pid)) == (parent.process.pid, parent.process.pid) and int(child) != int(pid)
        assert (secret, float(share)) == ("5ec4e7", 1.0)
        assert parent.ask("leave") == ""
        assert parent.line() == "heavy: []"
        assert parent.process.wait(PATIENCE_S) == 3
        assert parent.process.stderr and parent.process.stderr.read() == "the child's own words\n"


def test_a_crash_starts_another_child_on_the_same_socket_and_says_why() -> None:
    with held() as parent:
        first = parent.ask("who").split()[0]
        parent.ask("segv")
        second, *_, share = parent.ask("who").split()
        assert second != first and float(share) == 1.0
        assert parent.line() == "said: the serving process ended by SIGSEGV; starting it again"


def test_after_running_out_of_memory_the_next_child_takes_half() -> None:
    with held() as parent:
        parent.ask("abort")
        assert float(parent.ask("who").split()[-1]) == 0.5
        said = parent.line()
        assert said.startswith("said: the serving process ended by SIGABRT: terminating: Insufficient Memory; starting")
        assert "with 50% of the K/V budget" in said and "--memory-budget" in said
        parent.ask("kill")
        assert float(parent.ask("who").split()[-1]) == 0.25
        assert parent.line() == (
            "said: the serving process ended by SIGKILL, perhaps for lack of memory; starting it again with 25% of the "
            "K/V budget; if memory ran out, a lower --memory-budget or --ctx helps"
        )


def test_the_third_crash_in_a_few_minutes_is_the_last() -> None:
    with held() as parent:
        for _ in range(3):
            parent.ask("segv")
        said = "said: the serving process ended by SIGSEGV"
        assert [parent.line() for _ in range(2)] == [f"{said}; starting it again"] * 2
        assert parent.line() == f"{said}, 3 times in a few minutes; giving up"
        assert parent.process.wait(PATIENCE_S) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_child_once_and_nothing_is_started_again(number: signal.Signals) -> None:
    counting = f"""
        import os, signal, sys
        from mlxpaged.server.parent import handed
        given, got = handed(), []
        signal.signal({int(number)}, lambda *_: got.append(1))
        (listening,) = given.opened()
        listening.accept()[0].sendall(b"ready")
        while not got: signal.pause()
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, lambda *_: sys.exit(10 + len(got)))
        while True: signal.pause()
    """
    with held(counting) as parent:
        assert parent.ask("x") == "ready"
        parent.process.send_signal(number)
        assert parent.process.wait(PATIENCE_S) == 11
        assert parent.line() == "heavy: []"


def test_a_child_that_the_signal_itself_ends_is_no_failure() -> None:
    with held() as parent:
        parent.ask("who")
        parent.process.send_signal(signal.SIGTERM)
        assert parent.process.wait(PATIENCE_S) == 0


def test_a_child_learns_that_its_parent_was_killed() -> None:
    with held() as parent:
        parent.ask("who")
        with socket.create_connection(("127.0.0.1", parent.port), PATIENCE_S) as connection:
            connection.sendall(b"wait")
            parent.process.kill()
            assert connection.recv(10) == b"b''"
        child = int(parent.ask("who").split()[0])  # the socket is the child's as well
        os.kill(child, signal.SIGKILL)


def test_three_ends_count_only_within_ten_minutes() -> None:
    restarts = Restarts()
    assert [restarts.again(now) for now in (0.0, 599.0, 601.0, 1300.0)] == [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("code", "words", "abnormal", "out_of_memory"),
    [
        (0, "", False, False),
        (3, "mlxpaged: no model", False, False),
        (-signal.SIGKILL, "", True, False),
        (-signal.SIGKILL, "std::bad_alloc", True, True),
        (-signal.SIGSEGV, "", True, False),
        (-signal.SIGABRT, "[METAL] Command buffer execution failed: Caused GPU Hang Error (00000003:kIO", True, False),
        (-signal.SIGABRT, "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", True, True),
        (-signal.SIGABRT, "what():  std::bad_alloc", True, True),
    ],
)
def test_what_an_end_means(code: int, words: str, abnormal: bool, out_of_memory: bool) -> None:
    ending = Ending(code, words)
    assert (ending.abnormal, ending.out_of_memory) == (abnormal, out_of_memory)
    assert ending.perhaps_out_of_memory == (code == -signal.SIGKILL and not out_of_memory)
