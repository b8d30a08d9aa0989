"""Beginning and end of a server: the port, the address, signals, draining."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from mlxpaged.chat.backend import LocalBackend
from mlxpaged.errors import ConfigError, MlxpagedError, ModelNotFound
from mlxpaged.server.lifecycle import Server, serve
from mlxpaged.server.listening import listen, listen_unix, url_of
from mlxpaged.server.options import ServerOptions
from tests.scripted import ScriptedService, says
from tests.server.conftest import Serve

HELLO = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
CHAT = "/v1/chat/completions"


def test_a_port_in_use_is_one_line_with_its_holder_and_a_port_that_works() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(MlxpagedError) as refused:
            listen("127.0.0.1", port)
        message = str(refused.value)
        assert f"port {port} on 127.0.0.1 is held by" in message and f"(pid {os.getpid()})" in message
        assert refused.value.exit_code == 1 and "\n" not in message
        advised = re.search(r"--port (\d+)", message)
        assert advised is not None
        for bound in listen("127.0.0.1", int(advised[1])):
            bound.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::"])
def test_a_public_address_is_refused_unless_meant(host: str) -> None:
    with pytest.raises(ConfigError, match="--insecure-no-auth"):
        listen(host, 0)


def test_a_public_address_is_taken_when_meant() -> None:
    (bound,) = listen("0.0.0.0", 0, insecure_no_auth=True)
    bound.close()


def test_an_address_of_another_machine_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on --host 203\.0\.113\.7"):
        listen("203.0.113.7", 0, insecure_no_auth=True)


def test_localhost_listens_on_both_loopback_addresses() -> None:
    sockets = listen("localhost", 0)
    try:
        assert sockets[0].getsockname()[0] == "127.0.0.1"
        assert [bound.getsockname()[0] for bound in sockets[1:]] in ([], ["::1"])
        assert len({bound.getsockname()[1] for bound in sockets}) == 1
    finally:
        for bound in sockets:
            bound.close()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a socket to be; relative, since a whole path may be longer than a socket's may be."""
    monkeypatch.chdir(tmp_path)
    return Path("socket")


def test_a_unix_socket_is_this_users_alone_and_goes_with_the_server(path: Path) -> None:
    seen: list[int] = []
    service = ScriptedService()

    async def ask(url: str) -> None:
        seen.append(path.stat().st_mode & 0o777)
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(base_url=url, transport=transport, trust_env=False) as http:
            seen.append((await http.post(CHAT, json=HELLO)).status_code)
            seen.append((await http.post("/models/load", json={"model": "scripted"})).status_code)
            with pytest.raises(MlxpagedError, match="listens on"):
                listen_unix(path)
        raise ModelNotFound("enough")  # the way a companion ends its server

    with pytest.raises(ModelNotFound, match="enough"):
        serve(LocalBackend(service, name="scripted"), "127.0.0.1", 0, None, ask, path)
    assert seen == [0o600, 200, 200] and not path.exists()
    service.close()


def test_what_a_dead_server_left_is_replaced_and_anything_else_is_not(path: Path, tmp_path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    listen_unix(path).close()
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="--unix-socket"):
        listen_unix(file)
    assert file.read_text() == "precious"
    with pytest.raises(ConfigError, match="--unix-socket"):
        listen_unix(tmp_path / "absent" / "socket")


def test_a_key_opens_a_public_address() -> None:
    with pytest.raises(ConfigError, match="--api-key KEY"):
        serve(LocalBackend(ScriptedService(manual=True)), "0.0.0.0", 0)

    async def leave(url: str) -> None:
        raise ModelNotFound("enough")

    with pytest.raises(ModelNotFound):
        serve(LocalBackend(ScriptedService(manual=True)), "0.0.0.0", 0, ServerOptions(api_keys=("a-key-123",)), leave)


def test_a_stop_lets_a_running_stream_finish(serve: Serve) -> None:
    service = ScriptedService(lambda *_: says(*"abc"), manual=True)
    server = serve(service)
    with server.http.stream("POST", CHAT, json=HELLO) as answer:
        server.server.stop()
        for _ in range(4):
            service.step()
        text = answer.read().decode()
    assert text.endswith("data: [DONE]\n\n") and text.count('"content":"') == 4
    server.thread.join(20)
    assert not server.thread.is_alive()


def test_a_stream_that_outlives_the_shutdown_time_ends_with_an_error_event(serve: Serve) -> None:
    service = ScriptedService(manual=True)
    server = serve(service, options=ServerOptions(shutdown_s=0.05))
    with server.http.stream("POST", CHAT, json=HELLO) as answer:
        server.server.stop()
        service.wait_until(lambda _: service.num_cancelled == 1)
        service.step()
        text = answer.read().decode()
    error = '{"error":{"message":"the server is shutting down; the reply was cut off","type":"unavailable_error",'
    assert error in text and "[DONE]" not in text


def test_a_request_on_an_open_connection_during_the_drain_is_a_503(serve: Serve) -> None:
    service = ScriptedService(manual=True)
    server = serve(service)
    server.server._gate.close()
    answer = server.http.post(CHAT, json=HELLO)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert service.submitted == []


def test_what_runs_beside_the_server_can_end_it_with_its_error() -> None:
    async def load(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            assert (await http.get("/health")).status_code == 503
        raise ModelNotFound("no such model")

    service = ScriptedService(loading=True)
    server = Server(LocalBackend(service, name="absent"), ServerOptions())
    sockets = listen("127.0.0.1", 0)
    url = url_of(sockets[0])
    with pytest.raises(ModelNotFound, match="no such model"):
        server.run_until_stopped(sockets, load)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)
    service.close()


PROGRAM = """
import sys
from mlxpaged.chat.backend import LocalBackend
from mlxpaged.server.options import ServerOptions
from mlxpaged.server.lifecycle import serve
from tests.scripted import ScriptedService, says

async def ready(url):
    print(url, flush=True)

service = ScriptedService(lambda *_: says(*"abc"), manual=True)
say = lambda text: print(text, flush=True)
serve(LocalBackend(service), "127.0.0.1", 0, ServerOptions(shutdown_s=60), ready, say=say)
print("ended", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "way_out"), [(signal.SIGTERM, ""), (signal.SIGINT, "; Ctrl-C again ends it now")], ids=["TERM", "INT"]
)
def test_one_signal_drains_and_a_second_ends_at_once(number: signal.Signals, way_out: str) -> None:
    """The reply never ends by itself, nor when it is cut, and may run for 60 s: only the second signal can end this so
    soon, and has nothing to complain of."""
    root = Path(__file__).resolve().parent.parent.parent
    program = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        program, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={"PYTHONPATH": "."}
    ) as process:
        assert process.stdout and process.stderr
        try:
            url = process.stdout.readline().strip()
            with httpx.stream("POST", url + CHAT, json=HELLO, trust_env=False, timeout=20) as answer:
                assert answer.status_code == 200
                process.send_signal(number)
                while accepts(url):
                    pass
                assert process.poll() is None
                process.send_signal(number)
                assert process.wait(20) == 0
            assert process.stdout.read() == f"ending: waiting up to 60 s for 1 reply{way_out}\nended\n"
            assert process.stderr.read() == ""
        finally:
            process.kill()


def accepts(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def test_serve_takes_the_port_before_anything_else() -> None:
    begun = threading.Event()

    async def load(_: str) -> None:
        begun.set()

    with socket.create_server(("127.0.0.1", 0)) as holder, pytest.raises(MlxpagedError, match="is held by"):
        serve(LocalBackend(ScriptedService(manual=True)), "127.0.0.1", holder.getsockname()[1], None, load)
    assert not begun.is_set()
