"""Puts together what a command speaks through: an engine in this process, or a server elsewhere. Owns their
beginning and end; knows nothing of what is asked of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
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

_CLOSE_S = 1.0
"""How long leaving waits for the engine: a step ends well within it, a download may not."""


@dataclass(frozen=True)
class Opened:
    """A backend whose model may still be loading. `loading` is None where a server holds the model."""

    backend: Backend
    loading: Future[ModelInfo] | None = None
    model: str | None = None

    async def ready(self) -> ModelCard:
        """Waits until the model can answer. Raises what the load raised, ModelNotFound or Unreachable."""
        if self.loading:
            await asyncio.wrap_future(self.loading)
        cards = await self.backend.models()
        for card in cards:
            if self.loading or self.model in {None, card.name}:
                return card
        held = ", ".join(card.name for card in cards) or "no model"
        raise ModelNotFound(f"the server does not hold {self.model or 'a model'}; it holds {held}")

    def has_template(self) -> bool:
        """Whether conversations can be rendered; a server is taken at its word. Only after `ready`."""
        return self.loading is None or self.loading.result().tokenizer.chat_template is not None


@contextmanager
def started_engine(config: EngineConfig) -> Iterator[EngineService]:
    """An engine thread without a model; it is closed, and its requests cancelled, at the end.

    An engine that is busy loading cannot be interrupted: after a moment it is left to die with the process.
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
def opened_locally(model: str, config: EngineConfig, on_progress: LoadProgress) -> Iterator[Opened]:
    """A backend over an engine in this process, which starts to load `model` at once."""
    from ..chat.backend import LocalBackend

    with started_engine(config) as service:
        yield Opened(LocalBackend(service, name=model), service.load(model, on_progress), model)


@contextmanager
def opened_remotely(url: str, model: str | None) -> Iterator[Opened]:
    """A backend over the server at `url`; no model: whichever it holds."""
    from ..chat.remote import RemoteBackend

    # Its connections belong to the caller's event loop and end with the process.
    yield Opened(RemoteBackend(url, model), None, model)
