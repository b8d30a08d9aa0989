"""Who is inside: the replies this server is making. Owns draining and cutting; decides nothing about a request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from ..chat.backend import Reply
from ..errors import Overloaded

_T = TypeVar("_T")


class Gate:
    """Counts replies in and out. Once `close` was called nobody enters; `cut` ends those still inside."""

    def __init__(self) -> None:
        self._inside: set[Reply] = set()
        self._coming: set[asyncio.Future[Any]] = set()
        self._closed = False

    @property
    def num_live(self) -> int:
        """The replies inside and the requests on their way to them, as those that wait for a model."""
        return len(self._inside) + len(self._coming)

    def check(self) -> None:
        """Raises Overloaded when the server is shutting down."""
        if self._closed:
            raise Overloaded("the server is shutting down; send the request again once it is back")

    async def coming(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`, which leads to `enter`. Raises Overloaded where `cut` is called first."""
        working = asyncio.ensure_future(work)
        self._coming.add(working)
        try:
            return await working
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise Overloaded("the server is shutting down; the request was given up") from None
        finally:
            self._coming.discard(working)

    def enter(self, replies: Sequence[Reply]) -> None:
        self._inside.update(replies)

    def leave(self, replies: Sequence[Reply]) -> None:
        """The response is over, for whatever reason: what still runs of it is cancelled."""
        for reply in replies:
            reply.cancel()
        self._inside.difference_update(replies)

    def close(self) -> None:
        """Let nobody in from now on."""
        self._closed = True

    def cut(self) -> None:
        """Cancel every reply inside, and what is on its way; their streams end with an error event."""
        for working in self._coming:
            working.cancel()
        for reply in self._inside:
            reply.cancel()
