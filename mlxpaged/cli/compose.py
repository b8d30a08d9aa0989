"""Puts together what a command speaks through: an engine in this process, or a server elsewhere. Owns their
beginning and end; knows nothing of what is asked of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from ..config import EngineConfig
from ..engine.events import ModelInfo
from ..errors import ModelNotFound
from .exits import complain
from .progress import LoadProgress
from .version import on_a_gpu

if TYPE_CHECKING:
    from ..chat.backend import Backend, ModelCard
    from ..engine.service import EngineService

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

    @cached_property
    def loading(self) -> Future[ModelInfo]:
        """The load, begun by the first look at it."""
        return self._service.load(self._model, self._on_progress)

    async def ready(self) -> ModelCard:
        """Waits until the model can answer. Raises what the load raised."""
        await asyncio.wrap_future(self.loading)
        return (await self.backend.models())[0]


class OpenedRemotely:
    """A backend over the server at `url`; no model: whichever it holds."""

    def __init__(self, url: str, model: str | None) -> None:
        from ..chat.remote import RemoteBackend

        self.backend: Backend = RemoteBackend(url, model)
        self._model = model

    async def ready(self) -> ModelCard:
        """The model it holds. Raises ModelNotFound or Unreachable."""
        cards = await self.backend.models()
        for card in cards:
            if self._model in {None, card.name}:
                return card
        held = ", ".join(card.name for card in cards) or "no model"
        raise ModelNotFound(f"the server does not hold {self._model or 'a model'}; it holds {held}")


Opened = OpenedLocally | OpenedRemotely


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
def opened_remotely(url: str, model: str | None) -> Iterator[OpenedRemotely]:
    """A backend over a server; its connections belong to the caller's event loop and end with the process."""
    yield OpenedRemotely(url, model)
