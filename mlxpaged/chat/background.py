"""A server that a face starts in the background. Owns its process, command line, port and log; never imports the
engine.

    record, process = await started("smollm2", Start())     # it answers now, whatever its model does
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .. import paths
from ..config import DEFAULT_PORT
from ..errors import ConfigError, MlxpagedError, ModelNotFound, Unreachable
from .servers import ServerRecord, proves_itself, records

IDLE_EXIT_S = 600
"""A server started in the background ends itself after this long without a face or a request."""

_START_S = 60.0
_END_S = 5.0
_POLL_S = 0.1
_ERRORS = {2: ConfigError, 3: ModelNotFound, 4: Unreachable}


@dataclass(frozen=True, slots=True)
class Start:
    """How a server is started where none runs. `program` runs mlxpaged; `flags` are further flags of `serve`."""

    program: tuple[str, ...] = (sys.executable, "-m", "mlxpaged")
    flags: tuple[str, ...] = ()
    idle_exit_s: float = IDLE_EXIT_S

    def command(self, model: str, port: int) -> list[str]:
        """The command line of the background server."""
        idle = f"{self.idle_exit_s:g}"
        return [*self.program, "serve", model, "--port", str(port), "--idle-exit", idle, *self.flags]


def log_path() -> Path:
    """What the last server that was started in the background had to say."""
    return paths.state_dir() / "server.log"


async def started(model: str, start: Start) -> tuple[ServerRecord, subprocess.Popen[bytes]]:
    """A new server, on the usual port where that is free, so that other programs find it; else on any. Returns once it
    answers; raises Unreachable, or what `why_it_ended` says of one that does not come so far."""
    if not _listening(DEFAULT_PORT):
        try:
            return await _started_on(DEFAULT_PORT, model, start)
        except MlxpagedError:
            if not _listening(DEFAULT_PORT):
                raise  # it was not another program that came first
    return await _started_on(0, model, start)


async def _started_on(port: int, model: str, start: Start) -> tuple[ServerRecord, subprocess.Popen[bytes]]:
    """A server process of its own session: it outlives this face and gets none of its terminal's signals."""
    with _new_log() as log:
        process = subprocess.Popen(
            start.command(model, port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + _START_S
    try:
        while True:
            if process.poll() is not None:
                raise why_it_ended(process.returncode)
            record = next((one for one in records() if one.pid == process.pid), None)
            if record and await proves_itself(record):
                return record, process
            if time.monotonic() > deadline:
                raise Unreachable(f"the server did not start within {_START_S:.0f} s; its log is {log_path()}")
            await asyncio.sleep(_POLL_S / 2)
    except BaseException:
        with suppress(OSError):
            process.terminate()
        raise


def _new_log() -> BinaryIO:
    try:
        log_path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        log_path().unlink(missing_ok=True)
        return os.fdopen(os.open(log_path(), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600), "wb")
    except OSError as error:
        raise ConfigError(
            f"cannot start a server: {log_path()} cannot be written ({error.strerror}); MLXPAGED_STATE names another "
            "folder, --url a server that runs"
        ) from error


def _listening(port: int) -> bool:
    """Whether some program answers at a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a server ends within a few seconds."""
    deadline = time.monotonic() + _END_S
    while process.poll() is None and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    return process.returncode is not None


def why_it_ended(code: int) -> MlxpagedError:
    """Why a server that was started ended: its last line, as the error it stands for."""
    said = ""
    with suppress(OSError):
        lines = log_path().read_text(encoding="utf-8", errors="replace").splitlines()
        said = next((line for line in reversed(lines) if line.startswith("mlxpaged: ")), lines[-1] if lines else "")
    text = said.removeprefix("mlxpaged: ") or f"the server ended with code {code}; its log is {log_path()}"
    return _ERRORS.get(code, MlxpagedError)(text)
