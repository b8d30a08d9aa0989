"""`mlxpaged serve` as a process: it answers, says where, and leaves at the first Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import PATIENCE_S, ROOT, SCRIPTED


def test_it_says_where_it_answers_and_leaves_on_an_interrupt(environment: dict[str, str]) -> None:
    command = [*SCRIPTED, "serve", "scripted", "--port", "0", "--served-model-name", "other"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as server:
        assert server.stdout and server.stderr
        ready = server.stderr.readline()
        assert ready.startswith("mlxpaged: scripted is ready at http://127.0.0.1:")
        url = ready.split()[5]
        with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
            assert [entry["id"] for entry in http.get("/models").json()["data"]] == ["scripted", "other"]
            asked = {"model": "other", "messages": [{"role": "user", "content": "hi"}]}
            reply = http.post("/chat/completions", json=asked).json()
        assert reply["choices"][0]["message"]["content"] == "You said: hi"
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 0
        assert (server.stdout.read(), server.stderr.read()) == ("", "")


def test_a_model_that_cannot_be_loaded_ends_the_server(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*SCRIPTED, "serve", "missing", "--port", "0"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "mlxpaged: no model at 'missing'\n")


def test_a_chat_over_a_running_server(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [*SCRIPTED, "serve", "scripted", "--port", "0"], stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as server:
        assert server.stderr
        url = server.stderr.readline().split()[5]
        done = subprocess.run(
            [*SCRIPTED, "chat", "--url", url],
            input="one\nshow\n",
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
            timeout=PATIENCE_S,
            check=False,
        )
        server.terminate()
    assert done.stdout == "You said: one\nPROMPT [user/one] [assistant/You said: one] [user/show] [assistant/\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_a_key_from_the_environment_is_asked_for_on_a_unix_socket(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("socket")  # relative: a whole path may be longer than the 107 bytes that a socket's may have
    command = [*SCRIPTED, "serve", "scripted", "--unix-socket", str(path)]
    key = {"MLXPAGED_API_KEY": "a-secret-key"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment | key) as server:
        assert server.stderr
        assert server.stderr.readline().startswith(f"mlxpaged: scripted is ready at the unix socket {path}")
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(base_url="http://localhost", transport=transport, timeout=PATIENCE_S) as http:
            assert http.get("/v1/models").status_code == 401
            assert http.get("/v1/models", headers={"x-api-key": "a-secret-key"}).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
        assert "a-secret-key" not in server.stderr.read()
    assert not path.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], ["--host 0.0.0.0", "--api-key", "--insecure-no-auth"]),
        (["--api-key", "short"], ["8 or more"]),
        (["--on-switch", "never"], ["--on-switch", "wait or retry"]),
    ],
)
def test_what_would_be_unsafe_or_unclear_is_refused_at_once(
    environment: dict[str, str], flags: list[str], words: list[str]
) -> None:
    done = subprocess.run(
        [*SCRIPTED, "serve", "scripted", "--port", "0", *flags],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words), done.stderr
