"""What a client still sends when its answer is ready. Owns the rest of a body that nobody wants; never keeps any of it.

Many clients look for the answer only once they have sent everything. Closing a connection with unread bytes resets it,
so that they would see no answer at all: not who they are (401), where they come from (403), nor how much is too much.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DROPPED_BYTES = 256 * 2**20
"""What is read and dropped at most; who sends more meets the closed connection."""


class Unread:
    """Reads the rest of a request before its response begins, unless the client waits for leave to send it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, waits="expect" in Headers(scope=scope))

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                await body.drop()
            await send(message)

        await self._app(scope, body.receive, send_last)


class _Body:
    """One request's body on its way in. `waits`: its sender sends it once the first piece is asked for."""

    def __init__(self, receive: Receive, waits: bool) -> None:
        self._receive = receive
        self._wanted = not waits
        self._whole = False

    async def receive(self) -> Message:
        self._wanted = True
        message = await self._receive()
        self._whole = self._whole or not message.get("more_body", False)
        return message

    async def drop(self) -> None:
        dropped = 0
        while self._wanted and not self._whole and dropped <= _DROPPED_BYTES:
            dropped += len((await self.receive()).get("body", b""))
