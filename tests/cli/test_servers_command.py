"""`mlxpaged ps`, `stop` and `load` over servers of this user."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from mlxpaged.chat.servers import ServerRecord, gone, new_secret, processes_of, records
from mlxpaged.cli import servers
from mlxpaged.cli.doctor import port as port_finding
from tests.cli.conftest import SCRIPTED, Program, kill_server


@pytest.fixture(autouse=True)
def no_server_left(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLXPAGED_STATE", environment["MLXPAGED_STATE"])
    yield
    for record in records():
        kill_server(record.pid)


def test_a_server_is_loaded_listed_and_stopped(process: Program) -> None:
    assert process("ps", "--json").out == "[]\n"
    loaded = process("load", "scripted", ATTACHES="1")
    (record,) = records()
    assert loaded.code == 0
    assert loaded.err.splitlines()[-1] == f"mlxpaged: scripted is ready at {record.url}/v1 (context 512 tokens)"
    (listed,) = json.loads(process("ps", "--json").out)
    assert (listed["pid"], listed["url"], listed["running"]) == (record.pid, record.url, 0)
    assert listed["models"] == [{"name": "scripted", "state": "ready", "context_len": 512, "quantisation": "Q4_1"}]
    assert record.secret not in process("ps", "--json").out
    shown = process("ps").out.splitlines()
    assert shown[0].split()[:3] == ["PID", "URL", "MODEL"]
    assert "scripted (Q4_1)" in shown[1] and "0 running, 0 waiting" in shown[1] and "ends after 10 idle min" in shown[1]
    stopped = process("stop")
    assert (stopped.code, stopped.err) == (0, f"mlxpaged: stopped the server at {record.url} (pid {record.pid})\n")
    assert records() == []
    assert "no server of yours runs" in process("stop").err


@pytest.mark.parametrize("restart", ["--restart", "--no-restart"])
def test_serve_names_the_own_server_that_holds_its_port(process: Program, restart: str) -> None:
    assert process("load", "scripted", ATTACHES="1").code == 0
    (record,) = records()
    port = record.url.rpartition(":")[2]
    refused = process("serve", "scripted", "--port", port, restart)
    assert (refused.code, refused.err) == (
        1,
        f"mlxpaged: port {port} is held by your own mlxpaged server (pid {record.pid}); `mlxpaged stop` ends it, "
        "or use --port 0 for a free one\n",
    )


def test_doctor_has_no_advice_about_the_own_servers_port(process: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    assert process("load", "scripted", ATTACHES="1").code == 0
    (record,) = records()
    monkeypatch.setattr("mlxpaged.cli.doctor.DEFAULT_PORT", int(record.url.rpartition(":")[2]))
    found = port_finding()
    assert found.value.endswith(f"is your own server's (pid {record.pid})") and found.advice is None


def test_stop_ends_only_once_the_processes_have_and_their_port_is_free(process: Program) -> None:
    assert process("load", "scripted", ATTACHES="1").code == 0
    (record,) = records()
    processes = processes_of(record)
    assert len(processes) == 2
    assert process("stop").code == 0
    assert [one.pid for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(record.url.rpartition(":")[2]))) != 0


def test_a_server_whose_file_is_gone_but_whose_process_is_not_is_still_there() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as serving:
        record = ServerRecord(serving.pid, "http://127.0.0.1:9", new_secret(), 0.0)
        processes = processes_of(record)
        assert not asyncio.run(gone(record, processes, 0.1))
        serving.kill()
        assert asyncio.run(gone(record, processes, 20))  # nobody has waited for it yet: a zombie counts as ended


def test_a_server_that_does_not_end_is_named_and_the_code_is_1(
    process: Program, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process("load", "scripted", ATTACHES="1").code == 0
    (record,) = records()
    monkeypatch.setattr(servers, "_STOP_S", 0.1)
    psutil.Process(record.pid).suspend()
    ended = program("stop")
    assert (ended.code, ended.out) == (1, "")
    assert f"`kill -9 {record.pid}`" in ended.err and "stopped" not in ended.err


def test_a_server_with_a_key_lets_its_own_users_faces_in(process: Program, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [*SCRIPTED, "serve", "scripted", "--port", "0", "--api-key", "a-key-of-sixteen"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stderr and "scripted is ready" in server.stderr.readline()
        (record,) = records()
        refused = process("chat", "--url", record.url, stdin="hi\n", ATTACHES="1")
        assert refused.code != 0 and "needs an API key" in refused.err
        answered = process("chat", "--url", record.url, "--api-key", "a-key-of-sixteen", stdin="hi\n", ATTACHES="1")
        assert answered.out == "You said: hi\n"
        assert process("chat", stdin="hi\n", ATTACHES="1").out == "You said: hi\n"
        assert json.loads(process("ps", "--json").out)[0]["models"][0]["name"] == "scripted"
        assert process("stop").code == 0
        assert server.wait(20) == 0


@pytest.mark.parametrize(
    ("takes_s", "told"), [(0.0, []), (0.2, ["waiting for the replies that m is writing at http://x"])]
)
def test_unloading_tells_what_it_waits_for(
    takes_s: float, told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow:
        url = "http://x"

        async def unload(self, model: str) -> None:
            await asyncio.sleep(takes_s)

    monkeypatch.setattr(servers, "_TOLD_AFTER_S", 0.05)
    asyncio.run(servers._unload_at(Slow(), "m"))  # type: ignore[arg-type]
    lines = [line.removeprefix("mlxpaged: ") for line in capsys.readouterr().err.splitlines()]
    assert lines == [*told, "m is unloaded at http://x"]


Serving = Callable[..., ServerRecord]


@pytest.fixture
def serving(environment: dict[str, str]) -> Iterator[Serving]:
    """Starts `mlxpaged serve ARGS` on a free port; its record once its model is ready."""
    with ExitStack() as stack:

        def start(*args: str) -> ServerRecord:
            before = {record.pid for record in records()}
            command = [*SCRIPTED, "serve", *args, "--port", "0"]
            server = stack.enter_context(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
            stack.callback(kill_server, server.pid)
            assert server.stderr and "is ready" in server.stderr.readline()
            return next(record for record in records() if record.pid not in before)

        yield start


@contextmanager
def endless_reply(record: ServerRecord) -> Iterator[None]:
    """Inside, a reply of scripted runs there."""
    body = {"messages": [{"role": "user", "content": "stall"}], "stream": True}
    with httpx.stream("POST", f"{record.url}/v1/chat/completions", json=body, timeout=20, trust_env=False) as reply:
        pieces = reply.iter_bytes()
        next(pieces)
        yield


def test_load_says_what_it_waits_for_and_ps_that_it_waits(
    process: Program, serving: Serving, environment: dict[str, str]
) -> None:
    record = serving("scripted", "--also", "other")
    command = [*SCRIPTED, "load", "other"]
    with (
        endless_reply(record),
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as given_up,
    ):
        assert given_up.stderr
        lines = [given_up.stderr.readline() for _ in range(2)]
        assert lines == [
            f"mlxpaged: Attached to the server at {record.url} (pid {record.pid}).\n",
            "mlxpaged: other waits for 1 running reply of scripted\n",
        ]
        assert "scripted (Q4_1), other (waits)" in process("ps").out
        given_up.kill()
        given_up.wait()
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as stays:
            assert stays.stderr and [stays.stderr.readline() for _ in range(2)] == lines
            reply_is_over = endless_reply(record)
            with reply_is_over:
                assert "2 running replies" in stays.stderr.readline()
            assert "1 running reply" in stays.stderr.readline()
            stays.terminate()
    assert json.loads(process("ps", "--json").out)[0]["models"][0]["name"] == "scripted"
    loaded = process("load", "other")
    assert (loaded.code, loaded.err.splitlines()[-1]) == (
        0,
        f"mlxpaged: other is ready at {record.url}/v1 (context 512 tokens)",
    )


def test_a_model_is_unloaded_at_the_server_that_holds_it_and_loaded_at_one_that_is_named(
    process: Program, serving: Serving
) -> None:
    first, second = serving("scripted", "--also", "other"), serving("scripted", "--also", "other")
    nowhere = process("stop", "other")
    assert nowhere.code == 3
    assert nowhere.err == (
        f"mlxpaged: other is not in memory: the server at {second.url} holds scripted; "
        f"the one at {first.url} holds scripted\n"
    )
    absent = process("stop", "other", "--url", first.url)
    assert (absent.code, absent.err) == (
        3,
        f"mlxpaged: other is not in memory: the server at {first.url} holds scripted\n",
    )
    assert process("load", "other", "--url", first.url).code == 0
    attached = process("load", "other").err.splitlines()[0]
    assert attached == (
        f"mlxpaged: Attached to the server at {first.url} (pid {first.pid}, the one of 2 that holds other)."
    )
    youngest = process("load", "third").err.splitlines()[0]
    assert youngest == (
        f"mlxpaged: Attached to the server at {second.url} (pid {second.pid}, the youngest of 2; --url names another)."
    )
    unloaded = process("stop", "other")
    assert (unloaded.code, unloaded.err) == (0, f"mlxpaged: other is unloaded at {first.url}\n")
    assert process("stop", "other").code == 3


def test_a_path_that_the_server_was_not_started_with_is_refused_with_what_works(
    process: Program, serving: Serving, tmp_path: Path
) -> None:
    record, file = serving("scripted"), tmp_path / "own model.gguf"
    file.write_bytes(b"GGUF")
    for refused in (process("load", "own model.gguf"), process("chat", str(file), stdin="hi\n", ATTACHES="1")):
        assert refused.code == 3
        assert refused.err.splitlines()[-1] == (
            f"mlxpaged: the server at {record.url} was not started with {file} and takes no other path; "
            f"`mlxpaged cp '{file}' NAME` gives it a name that it takes, "
            f"`mlxpaged serve '{file}' --port 0` a server of its own"
        )
    assert process("cp", str(file), "mine").code == 0
    assert process("load", "mine").err.splitlines()[-1].startswith("mlxpaged: mine is ready")


def test_a_model_the_server_does_not_know_is_named_in_one_line(process: Program) -> None:
    assert process("load", "scripted", ATTACHES="1").code == 0
    ended = process("chat", "other/model", stdin="hi\n", ATTACHES="1")
    assert (ended.code, ended.out) == (3, "")
    assert "holds scripted and does not load other/model" in ended.err
    assert "end it with `mlxpaged stop`" in ended.err and ended.err.count("\n") == 1
    (record,) = records()
    missing = process("stop", "other/model")
    said = f"mlxpaged: other/model is not in memory: the server at {record.url} holds scripted\n"
    assert (missing.code, missing.err) == (3, said)
