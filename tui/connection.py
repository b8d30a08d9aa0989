"""The tie to what answers. Owns when it is made and made again, and what it is doing meanwhile; asks nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ..chat.backend import Backend, ModelCard
from ..errors import MlxpagedError

Say = Callable[[str], None]


class Link(Protocol):
    """A tie to one server, as `chat.attach` makes it."""

    @property
    def backend(self) -> Backend: ...

    @property
    def notice(self) -> str: ...

    async def ready(self, on_status: Say) -> ModelCard: ...

    async def close(self) -> None: ...


Connect = Callable[[Say], Awaitable[Link]]
"""Reaches a server, or starts one, saying meanwhile what it does. Raises MlxpagedError."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What answers, once it can."""

    link: Link
    card: ModelCard

    @property
    def backend(self) -> Backend:
        """Where requests go."""
        return self.link.backend


class Connection:
    """A link that is made when it is needed. `changed` is called whenever there is another engine or note."""

    def __init__(self, connect: Connect, changed: Callable[[], None]) -> None:
        self.engine: Engine | None = None
        self.note = ""
        """What it is doing or why there is none; empty once a model answers."""
        self.failed = False
        self._connect = connect
        self._changed = changed
        self._connecting: asyncio.Task[Engine] | None = None

    async def ready(self) -> Engine:
        """What answers; connects first where nothing does. Raises MlxpagedError."""
        if self.engine:
            return self.engine
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._reach())
        return await asyncio.shield(self._connecting)

    async def lost(self, in_use: bool) -> None:
        """The server went away: the next request connects again. `in_use`: others still read replies from it."""
        engine, self.engine = self.engine, None
        if engine and not in_use:
            await engine.link.close()

    def say(self, text: str, failed: bool = False) -> None:
        """What there is to know of it now."""
        self.note, self.failed = text, failed
        self._changed()

    async def close(self) -> None:
        """Lets go of the server."""
        if self._connecting:
            self._connecting.cancel()
        if self.engine:
            with suppress(MlxpagedError, OSError):
                await self.engine.link.close()

    async def _reach(self) -> Engine:
        link: Link | None = None
        try:
            self.say("looking for a server")
            link = await self._connect(self.say)
            card = await link.ready(self.say)
        except BaseException as error:
            if link:
                await link.close()
            if isinstance(error, MlxpagedError):
                self.say(str(error), failed=True)
            raise
        self.engine = Engine(link, card)
        self.say("")
        return self.engine
