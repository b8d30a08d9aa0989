"""How a face comes to a server: by address, by finding this user's own, or by having one started in the background (see
`background`). Never imports the engine, so a face is light and its crash harms no one.

    attached = await attach("smollm2")      # or attach(None): whatever runs; attach(url="http://...")
    card = await attached.ready()           # waits for the model; then attached.backend answers
    ...
    await attached.close()
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shlex
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from .. import paths
from ..config import DEFAULT_MODEL
from ..engine.events import Loading
from ..errors import MlxpagedError, ModelNotFound, Overloaded, RequestError, Unreachable, UnsupportedModel
from .backend import ModelCard
from .background import Start, has_ended, started, why_it_ended
from .remote import RemoteBackend
from .residency import Waiting
from .servers import ServerRecord, proven

PING_S = 60.0
_POLL_S = 0.1
_TELL_S = 0.25
"""How often a server is asked what a load waits for, and how far it is."""
_NEARNESS = {"ready": 0, "loading": 1, "waiting": 2, "unloaded": 3}

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
            if card and card.state == "loading":
                on_status(f"loading {card.name}")
                await asyncio.sleep(_POLL_S)
            elif name := card.name if card else self._model:
                await self._load(name, on_status)
            else:
                raise ModelNotFound(f"the server at {self.backend.url} has no model; name one")

    async def check_listed(self) -> None:
        """Raises ModelNotFound where the server does not name this face's model as one that it holds or would load."""
        if _meant(await self._cards(), self._model) is None:
            unknown = f"the server at {self.backend.url} has no model {self._model}"
            raise ModelNotFound(self._path_refused(self._model) or unknown)

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
            if self._process and await has_ended(self._process):
                raise why_it_ended(self._process.returncode) from None
            raise

    async def _load(self, name: str, on_status: OnStatus) -> None:
        loading = asyncio.create_task(self.backend.load(name))
        try:
            while not (await asyncio.wait({loading}, timeout=_TELL_S))[0]:
                on_status(await self._awaited(name))
            await loading
        except Overloaded:  # another load is under way there, or replies held this one up: `on_status` tells of it
            await asyncio.sleep(_POLL_S)
        except (ModelNotFound, UnsupportedModel, RequestError) as error:
            if isinstance(error, ModelNotFound) and (refused := self._path_refused(name)):
                raise ModelNotFound(refused) from error
            held = ", ".join(one.name for one in await self._cards() if one.state == "ready") or "no model"
            raise ModelNotFound(
                f"the server at {self.backend.url} holds {held} and does not load {name} ({error}); "
                f"use what it holds, or end it with `mlxpaged stop`"
            ) from error
        finally:
            loading.cancel()  # a load that has not begun there is taken back with its connection

    async def _awaited(self, name: str) -> str:
        """What making `name` ready waits for."""
        match await self.backend.awaited():
            case Waiting(model=model) as waiting:
                before = f"{name} comes after {model or 'an unload'}: " if model != name else ""
                return before + waiting.in_words()
            case Loading(model=model):
                return f"loading {model}"
        return f"loading {name}"

    def _path_refused(self, model: str | None) -> str | None:
        """What to say of a path of this machine that this user's own server does not know; None: it is none."""
        if self.record is None or model is None or not Path(model).is_absolute():
            return None
        typed = shlex.quote(model)
        return (
            f"the server at {self.backend.url} was not started with {model} and takes no other path; `mlxpaged cp "
            f"{typed} NAME` gives it a name that it takes, `mlxpaged serve {typed} --port 0` a server of its own"
        )

    async def _ping(self) -> None:
        """A face whose person thinks for a while still counts as one: the server does not end itself meanwhile."""
        while True:
            await asyncio.sleep(PING_S)
            if self._process:
                self._process.poll()
            with suppress(MlxpagedError):
                await self.backend.models()


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
        if found := await proven():
            chosen, why = await _chosen(found, model)
            notice = f"Attached to the server at {chosen.url} (pid {chosen.pid}{why})."
            return Attached(_backend(chosen, model), model, notice, chosen)
        on_status("starting a server")
        name = model or DEFAULT_MODEL
        record, process = await started(name, start)
    notice = (
        f"Started a server in the background at {record.url}/v1 (pid {record.pid}); other programs may use it. "
        f"It ends itself after {start.idle_exit_s / 60:.0f} idle minutes; `mlxpaged stop` ends it now."
    )
    return Attached(_backend(record, model), model, notice, record, process)


def _whole_name(model: str) -> str:
    """A path as any process would find it, a link at its end as it is: what that leads to may have another suffix.
    Other names as they are."""
    path = Path(model).expanduser()
    return str(path.parent.resolve() / path.name) if path.exists() and model != DEFAULT_MODEL else model


def _meant(cards: Sequence[ModelCard], model: str | None) -> ModelCard | None:
    """The card of `model`; None: of whichever is ready, else loading, else on disk there."""
    if model is not None:
        return next((card for card in cards if card.name == model), None)
    return min(cards, key=lambda card: _NEARNESS.get(card.state, len(_NEARNESS)), default=None)


def _backend(record: ServerRecord, model: str | None) -> RemoteBackend:
    return RemoteBackend(record.url, model, record.key(), record.transport())


async def _chosen(found: Sequence[ServerRecord], model: str | None) -> tuple[ServerRecord, str]:
    """The youngest of the servers where `model` is the nearest to being in memory, and the reason in words; no words
    where there is one server only."""
    if len(found) == 1:
        return found[0], ""
    distances = await asyncio.gather(*(_distance(record, model) for record in found))
    chosen, distance = min(zip(found, distances, strict=True), key=lambda pair: pair[1])
    if model is None or distance >= _NEARNESS["unloaded"]:
        return found[0], f", the youngest of {len(found)}; --url names another"
    return chosen, f", the one of {len(found)} that {'holds' if distance == 0 else 'is to hold'} {model}"


async def _distance(record: ServerRecord, model: str | None) -> int:
    """How far `model` is from being in memory there."""
    backend = _backend(record, None)
    try:
        card = _meant(await backend.models(), model) if model else None
        return _NEARNESS.get(card.state, len(_NEARNESS)) if card else len(_NEARNESS)
    except (Unreachable, Overloaded):
        return len(_NEARNESS)
    finally:
        await backend.close()


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
