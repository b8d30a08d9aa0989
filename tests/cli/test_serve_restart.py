"""`mlxpaged serve` outlives its engine: a crash in mid-stream costs the replies that ran, not the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cli.conftest import PATIENCE_S, ROOT, SCRIPTED

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
ENDLESS = {"messages": [{"role": "user", "content": "stall"}], "stream": True}


@contextmanager
def served(environment: dict[str, str], *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen(
        [*SCRIPTED, "serve", "scripted", "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    ) as server:
        try:
            assert server.stderr
            yield server, server.stderr.readline().split()[5]
        finally:
            server.kill()


def child_of(server: subprocess.Popen[str]) -> int:
    (child,) = psutil.Process(server.pid).children()
    return int(child.pid)


def test_an_abort_in_mid_stream_breaks_that_stream_only(environment: dict[str, str], tmp_path: Path) -> None:
    with served(environment) as (server, url), httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
        (record,) = (tmp_path / "state" / "servers").glob("*.json")
        before = json.loads(record.read_text())
        first = child_of(server)
        with pytest.raises(httpx.TransportError), http.stream("POST", "/chat/completions", json=ENDLESS) as answer:
            lines = answer.iter_lines()
            while "Once" not in next(lines):
                pass
            os.kill(first, signal.SIGABRT)
            for _ in lines:
                pass
        reply = http.post("/chat/completions", json=HELLO)  # waits in the backlog of the socket that never closed
        while reply.status_code == 503:  # the model is loaded again
            reply = http.post("/chat/completions", json=HELLO)
        assert reply.json()["choices"][0]["message"]["content"] == "You said: hi"
        assert server.stderr
        said = server.stderr.readline()
        assert said.startswith("mlxpaged: the serving process ended by SIGABRT") and "starting it again" in said
        assert child_of(server) != first and server.poll() is None
        after = json.loads(record.read_text())
        assert (after["pid"], after["secret"]) == (before["pid"], before["secret"]) == (server.pid, before["secret"])
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 0
        assert not record.exists()


@pytest.mark.parametrize(
    ("flags", "choices", "live"), [((), 1, "1 reply"), (("--no-restart",), 2, "2 replies")], ids=["restart", "alone"]
)
def test_a_second_interrupt_ends_live_replies_at_once_and_tells_their_client(
    environment: dict[str, str], flags: tuple[str, ...], choices: int, live: str
) -> None:
    with (
        served(environment, *flags) as (server, url),
        httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http,
        http.stream("POST", "/chat/completions", json={**ENDLESS, "n": choices}) as answer,
    ):
        assert server.stderr
        lines = answer.iter_lines()
        while "Once" not in next(lines):
            pass
        server.send_signal(signal.SIGINT)
        said = server.stderr.readline()
        assert said == f"mlxpaged: ending: waiting up to 10 s for {live}; Ctrl-C again ends it now\n"
        server.send_signal(signal.SIGINT)
        rest = "\n".join(lines)
        assert "the server is shutting down; the reply was cut off" in rest and "[DONE]" not in rest
        assert server.wait(PATIENCE_S) == 0
        assert server.stderr.read() == ""


def test_without_restart_the_serving_process_is_the_one_that_was_started(environment: dict[str, str]) -> None:
    with served(environment, "--no-restart") as (server, _):
        assert psutil.Process(server.pid).children() == []
        server.send_signal(signal.SIGABRT)
        assert server.wait(PATIENCE_S) == -signal.SIGABRT


def test_a_killed_parent_takes_the_server_with_it(environment: dict[str, str]) -> None:
    with served(environment) as (server, _):
        child = psutil.Process(child_of(server))
        server.kill()
        psutil.wait_procs([child], PATIENCE_S)
        assert not child.is_running()


def test_running_and_new_requests_go_on_after_a_stop_and_a_continue(environment: dict[str, str]) -> None:
    """What a laptop's sleep looks like to a process: the terminal's Ctrl-Z stops parent and child."""
    with served(environment) as (server, url), httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
        child = psutil.Process(child_of(server))
        with http.stream("POST", "/chat/completions", json=ENDLESS) as answer:
            lines = answer.iter_lines()
            while "Once" not in next(lines):
                pass
            server.send_signal(signal.SIGTSTP)
            while {psutil.Process(server.pid).status(), child.status()} != {psutil.STATUS_STOPPED}:
                pass
            server.send_signal(signal.SIGCONT)
            assert http.post("/chat/completions", json=HELLO).json()["choices"][0]["finish_reason"] == "stop"
        assert child.is_running() and server.poll() is None
