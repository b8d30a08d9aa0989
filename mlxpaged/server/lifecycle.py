"""The server's life: sockets, signals, draining, the end. Owns the uvicorn server; knows nothing of routes.

The first SIGTERM or SIGINT stops accepting and lets running replies finish, for `shutdown_s` at most; then they are cut
with an error event. The second signal cuts them at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from ..chat.backend import LocalBackend
from .app import create_app
from .gate import Gate
from .listening import is_loopback, listen, listen_unix, url_of
from .options import ServerOptions

WhileServing = Callable[[str], Coroutine[Any, Any, None]]

_TICK_S = 1.0
_LAST_RESORT_S = 5.0
"""After replies were cut, how long their last bytes may take before their connections are closed."""
_HURRIED_S = 2.0
"""The same after a second signal."""


def serve(
    backend: LocalBackend,
    host: str,
    port: int,
    options: ServerOptions | None = None,
    while_serving: WhileServing | None = None,
    unix_socket: Path | None = None,
    sockets: Sequence[socket.socket] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until a signal ends it; in the main thread. Returns when every reply has ended and the sockets are closed.

    With `unix_socket` that path is listened on instead of host and port. Raises what `listen` does, before anything
    else happens. `sockets`: they were taken already, by the parent process, which also cleans up. `while_serving` gets
    the base URL and runs beside the server (loading the model, saying when it is ready); what it raises ends the
    server and is raised here. `say` is told, once a signal came, which replies hold the end up.
    """
    options = options or ServerOptions()
    if sockets is not None:
        local = unix_socket is not None or is_loopback(host)
        Server(backend, replace(options, loopback=local), say).run_until_stopped(sockets, while_serving)
        return
    if unix_socket is not None:
        bound = listen_unix(unix_socket)
        try:
            Server(backend, replace(options, loopback=True), say).run_until_stopped([bound], while_serving)
        finally:
            unix_socket.unlink(missing_ok=True)
        return
    taken = listen(host, port, options.insecure_no_auth or bool(options.api_keys))
    Server(backend, replace(options, loopback=is_loopback(host)), say).run_until_stopped(taken, while_serving)


class Server(uvicorn.Server):
    """uvicorn's server with our draining, and without its ten wake-ups a second while idle."""

    def __init__(
        self, backend: LocalBackend, options: ServerOptions, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._gate = Gate()
        self._options = options
        self._say = say
        self._wake: Callable[[], object] = lambda: None
        self._signals: list[int] = []
        self._hurry: Callable[[], object] = lambda: None
        self._busy = (0, 0.0)  # requests so far, and the loop's time when one was last seen
        config = uvicorn.Config(
            create_app(backend, options, self._gate),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            # Clients reuse connections for about a minute; closing sooner shows as a reset in the middle of a request.
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(options.shutdown_s + 2 * _LAST_RESORT_S),  # ours come first
        )
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        super().__init__(config)

    def run_until_stopped(self, sockets: Sequence[socket.socket], while_serving: WhileServing | None = None) -> None:
        """See `serve`; on a thread other than the main one, `stop` takes the signal's place."""
        asyncio.run(self._run(list(sockets), while_serving))

    def stop(self) -> None:
        """What the first signal does; from any thread."""
        self.should_exit = True
        self._wake()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals.append(sig)
        if len(self._signals) > 1:
            self._hurry()
        self.stop()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn raises the signal again at the end; being asked to stop and stopping is not a failure.
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def main_loop(self) -> None:
        # A tick keeps the Date header right; a signal or `stop` does not wait for one.
        woken = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._busy = (0, loop.time())
        self._wake = lambda: loop.call_soon_threadsafe(woken.set)
        while not await self.on_tick(0) and not self._idled(loop.time()):
            with suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), _TICK_S)
        self._wake = lambda: None

    def _idled(self, now: float) -> bool:
        """Whether no request came or ran for as long as the options allow."""
        state, limit = self.server_state, self._options.idle_exit_s
        if state.tasks or state.total_requests != self._busy[0]:
            self._busy = (state.total_requests, now)
        return limit is not None and now - self._busy[1] >= limit

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gate.close()
        self._tell()
        loop = asyncio.get_running_loop()
        cutting = loop.call_later(self._options.shutdown_s, self._cut, _LAST_RESORT_S)
        self._hurry = lambda: loop.call_soon_threadsafe(self._cut, _HURRIED_S)
        if len(self._signals) > 1:  # the second came before anybody could hurry
            self._hurry()
        try:
            await super().shutdown(sockets)
        finally:
            self._hurry = lambda: None
            cutting.cancel()
            self._gate.cut()

    def _tell(self) -> None:
        """What the end waits for, where a signal asked for it and there is something."""
        live = self._gate.num_live
        if not live or not self._signals:
            return
        said = f"ending: waiting up to {self._options.shutdown_s:g} s for {live} {'reply' if live == 1 else 'replies'}"
        if self._signals[0] == signal.SIGINT:
            said += "; Ctrl-C again ends it now"
        with suppress(OSError):  # a terminal that is gone; the replies are not
            self._say(said)

    def _cut(self, grace_s: float) -> None:
        """End the replies, each with its error event; who has not read that after `grace_s` loses the connection."""
        self._gate.cut()
        asyncio.get_running_loop().call_later(grace_s, self._abandon)

    def _abandon(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport:
                connection.transport.abort()  # its request ends as one whose client has left
        self.force_exit = True

    async def _run(self, sockets: list[socket.socket], while_serving: WhileServing | None) -> None:
        serving = asyncio.create_task(self.serve(sockets))
        if while_serving is None:
            await serving
            return
        beside = asyncio.create_task(while_serving(url_of(sockets[0])))
        await asyncio.wait({serving, beside}, return_when=asyncio.FIRST_COMPLETED)
        if beside.done() and beside.exception():
            self.stop()
        await serving
        beside.cancel()
        with suppress(asyncio.CancelledError):
            await beside


def _is_news(record: logging.LogRecord) -> bool:
    """A request that the server's end has cancelled is no failure to tell of."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
