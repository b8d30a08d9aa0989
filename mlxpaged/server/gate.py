"""Who is inside: the replies this server is making. Owns draining and cutting; decides nothing about a request."""

from __future__ import annotations

from collections.abc import Sequence

from ..chat.backend import Reply
from ..errors import Overloaded


class Gate:
    """Counts replies in and out. Once `close` was called nobody enters; `cut` ends those still inside."""

    def __init__(self) -> None:
        self._inside: set[Reply] = set()
        self._closed = False

    def check(self) -> None:
        """Raises Overloaded when the server is shutting down."""
        if self._closed:
            raise Overloaded("the server is shutting down; send the request again once it is back")

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
        """Cancel every reply inside; their streams end with an error event."""
        for reply in self._inside:
            reply.cancel()
