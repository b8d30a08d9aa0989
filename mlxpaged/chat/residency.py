"""Who may rely on which model being in memory. Owns the order between requests and switches of the engine's resident
model; loads nothing itself.

A switch waits until nobody uses the resident model: until no request for it is being prepared and none of its replies
runs. Meanwhile newcomers for that model are let in, for PATIENCE_S after the switch was asked for; whoever comes later
waits for the switch, in order of arrival: nobody starves, and a prompt is never tokenised by one model and answered by
another. A reply may be very long, so a switch is waited for GIVE_UP_S at most: whoever asked is then told to try again,
and those behind go on. A reply that runs is never cut off for a switch. Who leaves before the switch has begun takes
the wish back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ModelLoading, Overloaded

if TYPE_CHECKING:
    from ..engine.service import EngineService

PATIENCE_S = 60.0
"""How long after a switch was asked for requests for the model in memory are still answered before it."""

GIVE_UP_S = 300.0
"""How long after it was asked for a switch gives up on replies that still run. The turn goes by arrival, so nobody
behind it waits longer for replies either; the time that loading takes comes on top."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A switch that has been asked for and has not begun: `model` is to come (None: memory is only to be given back)
    once the `replies` of `resident` that run or are about to have ended."""

    model: str | None
    resident: str
    replies: int

    def in_words(self) -> str:
        """One short phrase for a person."""
        return f"{self.model or 'unloading'} waits for {_running(self.replies)} of {self.resident}"


@dataclass(frozen=True, slots=True)
class _Wish:
    model: str | None
    asked: float  # the loop's time

    @property
    def is_patient(self) -> bool:
        return asyncio.get_running_loop().time() < self.asked + PATIENCE_S

    def given_up(self, replies: int) -> Overloaded:
        """What to tell whoever asked, where so many replies have not ended in time."""
        undone = f"{self.model} was not loaded" if self.model else "nothing was unloaded"
        return Overloaded(f"{undone}: {_running(replies)} did not end within {GIVE_UP_S:g} s; try again later")


class Residency:
    """The engine's resident model and who uses it. Belongs to one event loop."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._turn = asyncio.Lock()
        self._preparing = 0
        self._replies = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._wish: _Wish | None = None  # of whoever has the turn, while it waits
        self._switch: asyncio.Task[None] | None = None

    @property
    def switching(self) -> bool:
        """Whether a request that comes now has to wait, also for the model in memory."""
        if self._switch is not None and not self._switch.done():
            return True
        return self._turn.locked() and not (self._wish and self._wish.is_patient)

    @property
    def waiting(self) -> Waiting | None:
        """The switch that comes next and has not begun."""
        if self._wish is None or self._resident is None:
            return None
        return Waiting(self._wish.model, self._resident, self._users)

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Inside, the model `name` is in memory. A client that gives up while it is loaded leaves the load to those
        behind it. Raises Overloaded where running replies of another do not end in time."""
        if self.switching or self._resident != name:
            await self._bring(name)
        self._count(preparing=1)  # nothing else has run since the model was found in memory
        try:
            yield
        finally:
            self._count(preparing=-1)

    def reply_began(self) -> None:
        """A reply of the resident model runs from now on."""
        self._count(replies=1)

    def reply_ended(self) -> None:
        """One of those that began has said its last."""
        self._count(replies=-1)

    async def unload(self, name: str) -> None:
        """Give the model's memory back; nothing happens when it is not in memory. Raises Overloaded where its running
        replies do not end in time."""
        wish = _Wish(None, asyncio.get_running_loop().time())
        async with self._turn:
            await self._settled()
            if self._resident == name:
                await self._until_unused(wish)
                await self._begin(self._unload())

    async def _bring(self, name: str) -> None:
        wish = _Wish(name, asyncio.get_running_loop().time())
        async with self._turn:
            await self._settled()
            while self._resident != name:
                if self._service.loading is not None:
                    raise ModelLoading(f"the model {self._service.loading.model} is still loading; try again soon")
                await self._until_unused(wish)
                await self._begin(self._load(name))

    async def _until_unused(self, wish: _Wish) -> None:
        self._wish = wish
        try:
            async with asyncio.timeout_at(wish.asked + GIVE_UP_S):
                while not self._unused.is_set():  # a newcomer may have been quicker than the waking
                    await self._unused.wait()
        except TimeoutError:
            if not self._unused.is_set():  # the last one may have ended in this very moment
                raise wish.given_up(self._users) from None
        finally:
            self._wish = None

    async def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """The switch itself; it goes on when who asked for it leaves."""
        self._switch = asyncio.create_task(work)
        await asyncio.shield(self._switch)

    def _count(self, preparing: int = 0, replies: int = 0) -> None:
        self._preparing += preparing
        self._replies += replies
        if self._preparing or self._replies:
            self._unused.clear()
        else:
            self._unused.set()

    @property
    def _users(self) -> int:
        """The replies of the resident model that run or are about to; a request may have several."""
        return max(self._replies, self._preparing)

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

    async def _unload(self) -> None:
        await asyncio.wrap_future(self._service.unload())


def _running(replies: int) -> str:
    return f"{replies} running {'reply' if replies == 1 else 'replies'}"
