"""The server's life: sockets, signals, draining, the end. Owns the uvicorn server; knows nothing of routes.

The first SIGTERM or SIGINT stops accepting and lets running replies finish, for `shutdown_s` at most; then they are cut
with an error event. The second signal ends at once.
"""

from __future__ import annotations

import asyncio
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
"""After replies were cut, how long their last bytes may take before their tasks are cancelled."""


def serve(
    backend: LocalBackend,
    host: str,
    port: int,
    options: ServerOptions | None = None,
    while_serving: WhileServing | None = None,
    unix_socket: Path | None = None,
    sockets: Sequence[socket.socket] | None = None,
) -> None:
    """Serve until a signal ends it; in the main thread. Returns when every reply has ended and the sockets are closed.

    With `unix_socket` that path is listened on instead of host and port. Raises what `listen` does, before anything
    else happens. `sockets`: they were taken already, by the parent process, which also cleans up. `while_serving` gets
    the base URL and runs beside the server (loading the model, saying when it is ready); what it raises ends the
    server and is raised here.
    """
    options = options or ServerOptions()
    if sockets is not None:
        local = unix_socket is not None or is_loopback(host)
        Server(backend, replace(options, loopback=local)).run_until_stopped(sockets, while_serving)
        return
    if unix_socket is not None:
        bound = listen_unix(unix_socket)
        try:
            Server(backend, replace(options, loopback=True)).run_until_stopped([bound], while_serving)
        finally:
            unix_socket.unlink(missing_ok=True)
        return
    taken = listen(host, port, options.insecure_no_auth or bool(options.api_keys))
    Server(backend, replace(options, loopback=is_loopback(host))).run_until_stopped(taken, while_serving)


class Server(uvicorn.Server):
    """uvicorn's server with our draining, and without its ten wake-ups a second while idle."""

    def __init__(self, backend: LocalBackend, options: ServerOptions) -> None:
        self._gate = Gate()
        self._options = options
        self._wake: Callable[[], object] = lambda: None
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
            timeout_graceful_shutdown=int(options.shutdown_s + _LAST_RESORT_S),
        )
        super().__init__(config)

    def run_until_stopped(self, sockets: Sequence[socket.socket], while_serving: WhileServing | None = None) -> None:
        """See `serve`; on a thread other than the main one, `stop` takes the signal's place."""
        asyncio.run(self._run(list(sockets), while_serving))

    def stop(self) -> None:
        """What the first signal does; from any thread."""
        self.should_exit = True
        self._wake()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
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
        cutting = asyncio.get_running_loop().call_later(self._options.shutdown_s, self._gate.cut)
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()
            self._gate.cut()

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
