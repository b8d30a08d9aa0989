"""How a face comes to a server: by address, by finding this user's own, or by starting one in the background. Owns the
start of that process; never imports the engine, so a face is light and its crash harms no one.

    attached = await attach("smollm2")      # or attach(None): whatever runs; attach(url="http://...")
    card = await attached.ready()           # waits for the model; then attached.backend answers
    ...
    await attached.close()
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .. import paths
from ..config import DEFAULT_MODEL, DEFAULT_PORT
from ..errors import (
    ConfigError,
    MlxpagedError,
    ModelNotFound,
    Overloaded,
    RequestError,
    Unreachable,
    UnsupportedModel,
)
from .backend import ModelCard
from .remote import RemoteBackend
from .servers import ServerRecord, proven, proves_itself, records

IDLE_EXIT_S = 600
"""A server started in the background ends itself after this long without a face or a request."""

PING_S = 60.0
_START_S = 60.0
_END_S = 5.0
_POLL_S = 0.1
_NEARNESS = {"ready": 0, "loading": 1, "unloaded": 2}
_ERRORS = {2: ConfigError, 3: ModelNotFound, 4: Unreachable}

OnStatus = Callable[[str], None]
"""Called with a short phrase about what is being waited for."""


class Attached:
    """A face's tie to one server: `backend` speaks to it, `notice` is one line to show (how it was found or started;
    empty for an address that was given), `started` whether this face started it."""

    def __init__(
        self,
        backend: RemoteBackend,
        model: str | None,
        notice: str = "",
        record: ServerRecord | None = None,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.backend = backend
        self.notice = notice
        self.record = record
        self.started = process is not None
        self._model = model
        self._process = process
        self._pinging = asyncio.create_task(self._ping()) if record else None

    async def ready(self, on_status: OnStatus = lambda text: None) -> ModelCard:
        """Waits until the model can answer and gives its card; another model than the loaded one is loaded there.

        Raises ModelNotFound (the server does not know it or cannot load it), Unreachable, or what ended the server.
        """
        while True:
            card = _meant(await self._cards(), self._model)
            if card and card.state == "ready":
                return card
            on_status(f"loading {card.name if card else self._model or 'a model'}")
            if card and card.state == "loading":
                await asyncio.sleep(_POLL_S)
            elif name := card.name if card else self._model:
                await self._load(name)
            else:
                raise ModelNotFound(f"the server at {self.backend.url} has no model; name one")

    async def lists_model(self) -> bool:
        """Whether the server names this face's model as one that it holds or would load."""
        return _meant(await self._cards(), self._model) is not None

    async def close(self) -> None:
        """Let go of the server; it goes on for others, or ends itself when idle."""
        if self._pinging:
            self._pinging.cancel()
        if self._process:
            self._process.poll()  # one that has ended is no zombie from here on
        await self.backend.close()

    async def _cards(self) -> tuple[ModelCard, ...]:
        try:
            return await self.backend.models()
        except Unreachable:
            # Its sockets close a moment before it ends; why it ended is in its code and its last line.
            if self._process and await _ended(self._process):
                raise _died(self._process.returncode) from None
            raise

    async def _load(self, name: str) -> None:
        try:
            await self.backend.load(name)
        except Overloaded:  # another load is under way there
            await asyncio.sleep(_POLL_S)
        except (ModelNotFound, UnsupportedModel, RequestError) as error:
            held = ", ".join(one.name for one in await self._cards() if one.state == "ready") or "no model"
            raise ModelNotFound(
                f"the server at {self.backend.url} holds {held} and does not load {name} ({error}); "
                f"use what it holds, or end it with `mlxpaged stop`"
            ) from error

    async def _ping(self) -> None:
        """A face whose person thinks for a while still counts as one: the server does not end itself meanwhile."""
        while True:
            await asyncio.sleep(PING_S)
            if self._process:
                self._process.poll()
            with suppress(MlxpagedError):
                await self.backend.models()


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


async def attach(
    model: str | None = None,
    url: str | None = None,
    api_key: str | None = None,
    start: Start | None = None,
    on_status: OnStatus = lambda text: None,
) -> Attached:
    """A tie to the server at `url`; without one, to this user's own, the one that holds `model` first; where none
    runs, one is started in the background with `model` (None: smollm2) and the notice says so.

    Returns once the server answers, whatever its model does: `Attached.ready` waits for that. Raises Unreachable for
    an address that does not answer, and the reason where a server cannot be started.
    """
    start = start or Start()
    if url:
        backend = RemoteBackend(url, model, api_key)
        try:
            await backend.models()
        except BaseException:
            await backend.close()
            raise
        return Attached(backend, model)
    model = model and _whole_name(model)
    async with _one_at_a_time(on_status):
        found = await _chosen(await proven(), model)
        if found:
            notice = f"Attached to the server at {found.url} (pid {found.pid})."
            return Attached(_backend(found, model), model, notice, found)
        on_status("starting a server")
        name = model or DEFAULT_MODEL
        record, process = await _started(name, start)
    notice = (
        f"Started a server in the background at {record.url}/v1 (pid {record.pid}); other programs may use it. "
        f"It ends itself after {start.idle_exit_s / 60:.0f} idle minutes; `mlxpaged stop` ends it now."
    )
    return Attached(_backend(record, model), model, notice, record, process)


def _whole_name(model: str) -> str:
    """A path as any process would find it; other names as they are."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() and model != DEFAULT_MODEL else model


def log_path() -> Path:
    """What the last server that was started in the background had to say."""
    return paths.state_dir() / "server.log"


def _meant(cards: Sequence[ModelCard], model: str | None) -> ModelCard | None:
    """The card of `model`; None: of whichever is ready, else loading, else on disk there."""
    if model is not None:
        return next((card for card in cards if card.name == model), None)
    return min(cards, key=lambda card: _NEARNESS.get(card.state, len(_NEARNESS)), default=None)


def _backend(record: ServerRecord, model: str | None) -> RemoteBackend:
    return RemoteBackend(record.url, model, record.key(), record.transport())


async def _chosen(found: Sequence[ServerRecord], model: str | None) -> ServerRecord | None:
    """The youngest server that holds `model`; where none does, the youngest."""
    for record in found if model else ():
        backend = _backend(record, None)
        try:
            card = _meant(await backend.models(), model)
            if card and card.state != "unloaded":
                return record
        except (Unreachable, Overloaded):
            continue
        finally:
            await backend.close()
    return found[0] if found else None


async def _started(model: str, start: Start) -> tuple[ServerRecord, subprocess.Popen[bytes]]:
    """A new server, on the usual port where that is free, so that other programs find it; else on any."""
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
                raise _died(process.returncode)
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


async def _ended(process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _END_S
    while process.poll() is None and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    return process.returncode is not None


def _died(code: int) -> MlxpagedError:
    """Why a server that was started ended: its last line, as the error it stands for."""
    said = ""
    with suppress(OSError):
        lines = log_path().read_text(encoding="utf-8", errors="replace").splitlines()
        said = next((line for line in reversed(lines) if line.startswith("mlxpaged: ")), lines[-1] if lines else "")
    text = said.removeprefix("mlxpaged: ") or f"the server ended with code {code}; its log is {log_path()}"
    return _ERRORS.get(code, MlxpagedError)(text)


@asynccontextmanager
async def _one_at_a_time(on_status: OnStatus) -> AsyncIterator[None]:
    """Two faces that begin together start one server, not two."""
    try:
        paths.state_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(paths.state_dir() / "start.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # a read-only home: starting will say so, attaching needs no lock
        yield
        return
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                on_status("waiting for a server that is being started")
                await asyncio.sleep(_POLL_S)
        yield
    finally:
        os.close(file)
