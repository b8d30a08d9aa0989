"""The tie to what answers. Owns when it is made and made again, and what it is doing meanwhile; asks nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..chat.backend import Backend, ModelCard
from ..errors import MlxpagedError

Result = TypeVar("Result")

Say = Callable[[str], None]


class Link(Protocol):
    """A tie to one server, as `chat.attach` makes it."""

    @property
    def backend(self) -> Backend: ...

    @property
    def notice(self) -> str: ...

    async def look(self, on_status: Say) -> None:
        """Raises MlxpagedError where the model cannot be had; loads nothing."""
        ...

    async def ready(self, on_status: Say) -> ModelCard: ...

    async def close(self) -> None: ...


Connect = Callable[[str | None, Say], Awaitable[Link]]
"""Reaches a server for a model (None: whichever it holds), or starts one, saying meanwhile what it does. Raises
MlxpagedError."""


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
    """A link for one model, made when it is needed. `changed` is called whenever there is another engine or note."""

    def __init__(self, model: str | None, connect: Connect, changed: Callable[[], None]) -> None:
        self.model = model
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

    async def look(self) -> None:
        """Finds out whether the model can be had, before anyone asks it something. Raises MlxpagedError."""
        await self._linked(self._look)

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
        self.engine = await self._linked(self._made_ready)
        self.say("")
        return self.engine

    async def _made_ready(self, link: Link) -> Engine:
        return Engine(link, await link.ready(self.say))

    async def _look(self, link: Link) -> None:
        await link.look(self.say)
        await link.close()
        self.say("")

    async def _linked(self, use: Callable[[Link], Awaitable[Result]]) -> Result:
        link: Link | None = None
        try:
            self.say("looking for a server")
            link = await self._connect(self.model, self.say)
            return await use(link)
        except BaseException as error:
            if link:
                await link.close()
            if isinstance(error, MlxpagedError):
                self.say(str(error), failed=True)
            raise


class Connections:
    """One for each of the app's models; the first one's is everybody's who asks for none of them."""

    def __init__(self, models: Sequence[str], connect: Connect, changed: Callable[[], None]) -> None:
        names: Sequence[str | None] = list(dict.fromkeys(models)) or [None]
        self._by_model = {model: Connection(model, connect, changed) for model in names}

    @property
    def first(self) -> Connection:
        """The one of the model that was named first, or of whichever the server holds."""
        return next(iter(self._by_model.values()))

    @property
    def others(self) -> list[Connection]:
        """Those of further models."""
        return list(self._by_model.values())[1:]

    def of(self, model: str | None) -> Connection:
        """Where a session of this model is answered."""
        return self._by_model.get(model, self.first)

    async def close(self) -> None:
        """Lets go of every server."""
        for connection in self._by_model.values():
            await connection.close()
