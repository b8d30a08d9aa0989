"""Who may rely on which model being in memory. Owns the order between requests and switches of the engine's resident
model; loads nothing itself.

A switch waits for the requests that are being prepared (the engine lets running replies finish), and whoever comes
after it waits for the switch, in order of arrival: nobody starves, and a prompt is never tokenised by one model and
answered by another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from ..errors import Overloaded

if TYPE_CHECKING:
    from ..engine.service import EngineService


class Residency:
    """The engine's resident model and who uses it. Belongs to one event loop."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._turn = asyncio.Lock()
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._switch: asyncio.Task[None] | None = None

    @property
    def switching(self) -> bool:
        return self._turn.locked() or (self._switch is not None and not self._switch.done())

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Inside, the model `name` is in memory. A client that gives up waiting leaves the load to those behind it."""
        async with self._turn:
            await self._settled()
            while self._resident != name:
                if self._service.loading is not None:
                    raise Overloaded(f"the model {self._service.loading.model} is still loading; try again soon")
                await self._unused.wait()
                self._switch = asyncio.create_task(self._load(name))
                await asyncio.shield(self._switch)
            self._users += 1
            self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def unload(self, name: str) -> None:
        """Give the model's memory back; nothing happens when it is not in memory."""
        async with self._turn:
            await self._settled()
            if self._resident == name:
                await self._unused.wait()
                await asyncio.shield(asyncio.wrap_future(self._service.unload()))

    @property
    def _resident(self) -> str | None:
        model = self._service.model
        return model.name if model else None

    async def _settled(self) -> None:
        """Wait for a switch whose client has left; how it ended is told to whoever needs that model next."""
        if self._switch is not None and not self._switch.done():
            with suppress(Exception):
                await asyncio.shield(self._switch)

    async def _load(self, name: str) -> None:
        await asyncio.wrap_future(self._service.load(name, fetch=False))
