"""How a face finds a server: only one that proves itself, else it starts one that ends itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.chat import servers
from mlxpaged.chat.attach import attach
from mlxpaged.chat.background import Start, log_path
from mlxpaged.chat.messages import Messages
from mlxpaged.chat.servers import ServerRecord, new_secret, proof, proven, proves_itself, records, registered
from mlxpaged.errors import ConfigError, ModelNotFound, Unreachable
from mlxpaged.sched.requests import SamplingParams
from tests.cli.conftest import kill_server

SCRIPTED = Start(program=(sys.executable, "-m", "tests.cli.program"))
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """State of the test's own; every server that it left behind is ended."""
    monkeypatch.setenv("MLXPAGED_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield
    for record in records():
        if record.pid != os.getpid():
            kill_server(record.pid)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def first_words(attached: Any, text: str) -> str:
    reply = await attached.backend.start(Messages(({"role": "user", "content": text},)), SamplingParams())
    return "".join([delta.text async for delta in reply])


@pytest.fixture
def stranger() -> Iterator[str]:
    """A server of somebody else: it answers the handshake with what it does not know."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"proof": "0" * 64, "data": []}).encode())

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_is_started_used_found_again_and_ended() -> None:
    async def story() -> None:
        first = await attach("scripted", start=SCRIPTED)
        assert first.started and first.record
        assert f"Started a server in the background at {first.record.url}/v1 (pid {first.record.pid})" in first.notice
        card = await first.ready()
        assert (card.name, card.state) == ("scripted", "ready")
        assert await first_words(first, "hello") == "You said: hello"
        second = await attach(None, start=SCRIPTED)
        assert not second.started
        assert second.notice == f"Attached to the server at {first.record.url} (pid {first.record.pid})."
        assert (await second.ready()).name == "scripted"
        file = servers.folder() / f"{first.record.pid}.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(servers.folder().stat().st_mode) == 0o700
        assert os.getsid(first.record.pid) == first.record.pid != os.getsid(0)
        await first.close()
        assert await first_words(second, "still there") == "You said: still there"
        processes = servers.processes_of(first.record)
        assert len(processes) == 2 and not await servers.gone(first.record, processes, 0)
        os.kill(first.record.pid, signal.SIGTERM)
        assert await servers.gone(first.record, processes, 20)
        await second.close()

    run(story())
    assert records() == [] and list(servers.folder().iterdir()) == []


def test_an_idle_server_ends_itself_and_leaves_no_file() -> None:
    async def story() -> ServerRecord:
        attached = await attach("scripted", start=Start(SCRIPTED.program, idle_exit_s=1))
        await attached.close()
        assert attached.record and attached._process
        assert await asyncio.to_thread(attached._process.wait, 20) == 0
        return attached.record

    record = run(story())
    assert not (servers.folder() / f"{record.pid}.json").exists()


def test_two_faces_that_begin_together_start_one_server() -> None:
    async def story() -> None:
        both = await asyncio.gather(*(attach("scripted", start=SCRIPTED) for _ in range(2)))
        assert len({one.record.pid for one in both if one.record}) == 1
        assert sorted(one.started for one in both) == [False, True]
        for one in both:
            await one.close()

    run(story())


def test_why_a_server_could_not_be_started_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model at 'missing'"):
        run(_loaded("missing"))
    with pytest.raises(ConfigError, match="No such option: --no-such-flag"):
        run(attach("scripted", start=Start(SCRIPTED.program, flags=("--no-such-flag",))))
    assert stat.S_IMODE(log_path().stat().st_mode) == 0o600


async def _loaded(model: str) -> None:
    attached = await attach(model, start=SCRIPTED)
    try:
        await attached.ready()
    finally:
        await attached.close()


def test_a_state_folder_that_cannot_be_written_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MLXPAGED_STATE", str(blocked))
    with pytest.raises(ConfigError, match="MLXPAGED_STATE names another folder, --url a server that runs"):
        run(attach("scripted", start=SCRIPTED))


def test_an_address_that_does_not_answer_is_unreachable() -> None:
    with pytest.raises(Unreachable, match=r"no server answers at http://127.0.0.1:9; .*mlxpaged serve"):
        run(attach(url="http://127.0.0.1:9"))


def test_a_server_that_cannot_prove_itself_is_not_used(stranger: str) -> None:
    record = ServerRecord(os.getpid(), stranger, new_secret(), 1.0)
    with registered(record):
        assert records() == [record]
        assert not run(proves_itself(record))
        assert run(proven()) == []


def test_files_of_the_dead_go_and_files_others_may_read_are_ignored() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    with registered(ServerRecord(ended.pid, "http://127.0.0.1:1", new_secret(), 1.0)):
        assert records() == []
        assert list(servers.folder().iterdir()) == []
    with registered(ServerRecord(os.getpid(), "http://127.0.0.1:1", new_secret(), 1.0)):
        (file,) = servers.folder().iterdir()
        file.chmod(0o644)
        assert records() == []
        file.chmod(0o600)
        file.write_text('{"pid": 1}')
        assert records() == []


def test_a_secret_never_travels_and_is_not_printed() -> None:
    secret = new_secret()
    record = ServerRecord(1, "http://127.0.0.1:1", secret, 1.0)
    assert secret not in repr(record)
    answers = {proof(secret, "00"), proof(secret, "01"), proof(new_secret(), "00"), record.key()}
    assert len(answers) == 4 and secret not in answers


def test_attaching_imports_no_mlx() -> None:
    code = (
        "import sys, mlxpaged.chat.attach, mlxpaged.chat.store\n"
        "print([name for name in sys.modules if name.split('.')[0] in {'mlx', 'mlx_lm', 'transformers', 'textual'}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
