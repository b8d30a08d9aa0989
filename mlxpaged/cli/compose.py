"""Puts together what a command speaks through: an engine in this process, or a server elsewhere. Owns their
beginning and end; knows nothing of what is asked of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from ..config import EngineConfig
from ..engine.events import ModelInfo
from ..errors import ModelNotFound, Overloaded
from .exits import complain
from .progress import LoadProgress
from .version import on_a_gpu

if TYPE_CHECKING:
    from ..chat.attach import Attached
    from ..chat.backend import Backend, ModelCard
    from ..engine.service import EngineService

Result = TypeVar("Result")

_CLOSE_S = 2.0
"""How long leaving waits for the engine: a step or a download ends well within it, reading large weights may not."""


class OpenedLocally:
    """A backend over an engine of this process. The load begins when it is asked for: importing mlx and a prompt that
    appears at once are rivals for the interpreter."""

    def __init__(self, service: EngineService, model: str, on_progress: LoadProgress) -> None:
        from ..chat.backend import LocalBackend

        self.backend: Backend = LocalBackend(service, name=model)
        self._service = service
        self._model = model
        self._on_progress = on_progress
        self.notice, self.started = "", False

    @cached_property
    def loading(self) -> Future[ModelInfo]:
        """The load, begun by the first look at it."""
        return self._service.load(self._model, self._on_progress)

    async def ready(self) -> ModelCard:
        """Waits until the model can answer. Raises what the load raised."""
        await asyncio.wrap_future(self.loading)
        return (await self.backend.models())[0]

    async def look(self) -> None:
        """Nothing: what is wrong with a model is found by the load."""

    async def again(self) -> ModelCard:
        """The engine of this process does not go away."""
        return await self.ready()

    async def switch(self, model: str) -> ModelCard:
        """Another model in place of this one."""
        await asyncio.wrap_future(self._service.load(model, self._on_progress))
        return (await self.backend.models())[0]

    async def close(self) -> None:
        """Nothing: the engine is closed by whoever started it."""


class OpenedAttached:
    """A backend over a server: the one at `url`, else this user's own, else one that is started in the background.

    Nothing happens before `ready`. A model that is not on disk yet is fetched here, where a person sees it happen.
    """

    def __init__(
        self,
        model: str | None,
        url: str | None,
        api_key: str | None,
        server_flags: tuple[str, ...],
        progress: LoadProgress,
    ) -> None:
        self._model = model
        self._url = url
        self._api_key = api_key
        self._flags = server_flags
        self._progress = progress
        self._attached: Attached | None = None
        self.notice = ""
        """One line on where the answers come from; empty for an address that was given."""
        self.started = False

    @property
    def backend(self) -> Backend:
        """What answers; there once `ready` has returned."""
        if self._attached is None:
            raise Overloaded("not attached to a server yet; try again soon")
        return self._attached.backend

    async def ready(self) -> ModelCard:
        """Waits until the model can answer there. Raises ModelNotFound, Unreachable, ConfigError, or what ended the
        server."""
        missing = await self._missing() if self._attached is None else None
        try:
            return await (await self._reached()).ready(self._progress.say)
        except ModelNotFound as error:
            raise missing or error from None

    async def look(self) -> None:
        """Fetches the model where it is not on disk and reaches a server, but loads nothing. Raises ModelNotFound where
        it is neither here nor there, and what `ready` raises."""
        missing = await self._missing()
        try:
            await (await self._reached()).check_listed()
        except ModelNotFound as error:
            raise missing or error from None

    async def _reached(self) -> Attached:
        """The tie to the server, made where there is none."""
        from ..chat.attach import attach
        from ..chat.background import Start

        if self._attached is None:
            start = Start(flags=self._flags)
            self._attached = await attach(self._model, self._url, self._api_key, start, self._progress.say)
            self.started, self.notice = self._attached.started, self._attached.notice
            if self._flags and not self.started:
                self.notice += f" It runs already, so {' '.join(self._flags)} changes nothing there."
        return self._attached

    async def again(self) -> ModelCard:
        """After the server went away: `ready` from the beginning."""
        await self.close()
        return await self.ready()

    async def switch(self, model: str) -> ModelCard:
        """Another model from now on; when that fails, the one before stays, and so does the tie to its server."""
        other = OpenedAttached(model, self._url, self._api_key, self._flags, self._progress)
        try:
            card = await other.ready()
        except BaseException:
            await other.close()
            raise
        await self.close()
        self._model, self._attached = model, other._attached
        self.started, self.notice = other.started, other.notice
        return card

    async def close(self) -> None:
        """Let go of the server."""
        attached, self._attached = self._attached, None
        if attached:
            await attached.close()

    async def _missing(self) -> ModelNotFound | None:
        """Fetches a model that is not on this disk; why that was in vain. Raises it where no server runs: one may know
        the model by a name of its own."""
        model = self._model
        if model is None or self._url:
            return None
        try:
            await asyncio.wrap_future(in_a_daemon_thread(lambda: fetch_model(model, self._progress)))
        except ModelNotFound as error:
            if not _servers():
                raise
            return error
        return None


def _servers() -> bool:
    from ..chat.servers import records

    return bool(records())


Opened = OpenedLocally | OpenedAttached


@contextmanager
def started_engine(config: EngineConfig) -> Iterator[EngineService]:
    """An engine thread without a model; it is closed, and its requests cancelled, at the end.

    An engine that reads weights cannot be interrupted: after a moment it is left to die with the process.
    """
    from ..engine.service import EngineService
    from ..model.blas import blas_hint, open_system_blas

    if (hint := blas_hint(open_system_blas())) and not on_a_gpu():
        complain(hint)
    service = EngineService(config)
    try:
        yield service
    finally:
        closing = threading.Thread(target=service.close, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


@contextmanager
def opened_locally(model: str, config: EngineConfig, on_progress: LoadProgress) -> Iterator[OpenedLocally]:
    """A backend over an engine in this process."""
    with started_engine(config) as service:
        try:
            yield OpenedLocally(service, model, on_progress)
        finally:
            on_progress.abandoned = True


@contextmanager
def opened_for_chat(
    model: str | None, url: str | None, api_key: str | None, server_flags: tuple[str, ...], progress: LoadProgress
) -> Iterator[OpenedAttached]:
    """A backend over a server. Its connections belong to the caller's event loop and end with the process; a fetch that
    still runs at the end is given up."""
    try:
        yield OpenedAttached(model, url, api_key, server_flags, progress)
    finally:
        progress.abandoned = True


def fetch_model(name: str, progress: LoadProgress) -> None:
    """Makes sure that a model is on this disk. Raises ModelNotFound, UnsupportedModel, ConfigError or Unreachable."""
    from ..model.sources import resolve

    resolve(name, progress)


def in_a_daemon_thread(work: Callable[[], Result]) -> Future[Result]:
    """The work's result; a thread that the end of the process does not wait for."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # the waiter's to handle
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
