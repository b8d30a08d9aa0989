"""Server-sent events, byte for byte, and what happens when a client leaves. Owns the stream's framing and keep-alive;
knows nothing of what an event says.

The bytes: `data: <json>` and an empty line per event; no `id:` or `event:` unless a dialect asks; the keep-alive is a
comment with ONE newline, because some clients take an empty line after a comment for an empty event and break.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE = b": ka\n"
DONE = b"data: [DONE]\n\n"

_T = TypeVar("_T")


def event(payload: Any, name: str | None = None) -> bytes:
    """One event with a JSON payload, and the `event:` line of dialects that name theirs."""
    named = b"" if name is None else f"event: {name}\n".encode()
    return named + b"data: " + msgspec.json.encode(payload) + b"\n\n"


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`; when the client leaves first, `work` is cancelled, waited for, and ClientGone raised."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        for task in (working, leaving):
            with suppress(asyncio.CancelledError, Exception):
                await task


class EventStream(Response):
    """A 200 whose headers go out at once, then `events` as they come, each sent by itself.

    When nothing was sent for `keep_alive_s` seconds a keep-alive comment is. `on_close` is called once the stream is
    over, however it ended and even if `events` was never begun (closing a generator that has not started runs none of
    its code). An exception in `events` ends the connection without the final chunk.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], keep_alive_s: float, on_close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._on_close = on_close
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._stream(send))
        except ClientGone:
            pass
        finally:
            self._on_close()

    async def _stream(self, send: Send) -> None:
        beat = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            beat = asyncio.create_task(self._keep_alive(send))
            async for data in self._events:
                self._last_sent = asyncio.get_running_loop().time()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            if beat:
                beat.cancel()
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        self._last_sent = max(self._last_sent, clock())
        while True:
            await asyncio.sleep(self._last_sent + self._keep_alive_s - clock())
            if clock() - self._last_sent >= self._keep_alive_s:
                self._last_sent = clock()
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
