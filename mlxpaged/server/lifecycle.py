"""The server's life: sockets, signals, draining, the end. Owns the uvicorn server; knows nothing of routes.

The first SIGTERM or SIGINT stops accepting and lets running replies finish, for `shutdown_s` at most; then they are cut
with an error event. The second signal ends at once.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import uvicorn

from ..chat.backend import LocalBackend
from ..errors import ConfigError, MlxpagedError
from .app import create_app
from .gate import Gate
from .options import ServerOptions

WhileServing = Callable[[str], Coroutine[Any, Any, None]]

_TICK_S = 1.0
_LAST_RESORT_S = 5.0
"""After replies were cut, how long their last bytes may take before their tasks are cancelled."""


def listen(host: str, port: int, insecure_no_auth: bool = False) -> list[socket.socket]:
    """Listening sockets, taken before a model is loaded so that a port in use is known at once.

    `localhost` listens on 127.0.0.1 and, where it exists, on ::1; port 0 picks a free one. Raises ConfigError for an
    address that cannot be had or one that would open the server to the network unasked, MlxpagedError for a port in
    use, naming its holder.
    """
    if not insecure_no_auth and not is_loopback(host):
        raise ConfigError(
            f"--host {host} opens the server to the network without a key; "
            "use --host 127.0.0.1, or add --api-key KEY, or --insecure-no-auth"
        )
    first = _bind("127.0.0.1" if host == "localhost" else host, port)
    sockets = [first]
    if host == "localhost" and socket.has_ipv6:
        with suppress(MlxpagedError):
            sockets.append(_bind("::1", first.getsockname()[1]))
    return sockets


def listen_unix(path: Path) -> socket.socket:
    """A listening unix socket that only this user can open. What a dead server left at `path` is removed; anything
    else there is a ConfigError, a live server a MlxpagedError."""
    bound = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            _remove_dead(path)
        before = os.umask(0o177)
        try:
            bound.bind(str(path))
        finally:
            os.umask(before)
        bound.listen(1024)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on --unix-socket {path}: {error.strerror or error}; try another") from error
    except MlxpagedError:
        bound.close()
        raise
    return bound


def _remove_dead(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise MlxpagedError(f"a server listens on {path} already; stop it, or name another --unix-socket")


def serve(
    backend: LocalBackend,
    host: str,
    port: int,
    options: ServerOptions | None = None,
    while_serving: WhileServing | None = None,
    unix_socket: Path | None = None,
) -> None:
    """Serve until a signal ends it; in the main thread. Returns when every reply has ended and the sockets are closed.

    With `unix_socket` that path is listened on instead of host and port. Raises what `listen` does, before anything
    else happens. `while_serving` gets the base URL and runs beside the server (loading the model, saying when it is
    ready); what it raises ends the server and is raised here.
    """
    options = options or ServerOptions()
    if unix_socket is not None:
        bound = listen_unix(unix_socket)
        try:
            Server(backend, replace(options, loopback=True)).run_until_stopped([bound], while_serving)
        finally:
            unix_socket.unlink(missing_ok=True)
        return
    sockets = listen(host, port, options.insecure_no_auth or bool(options.api_keys))
    Server(backend, replace(options, loopback=is_loopback(host))).run_until_stopped(sockets, while_serving)


def url_of(bound: socket.socket) -> str:
    """The base URL of a listening socket, without `/v1`; a unix socket's client calls it localhost."""
    if bound.family == socket.AF_UNIX:
        return "http://localhost"
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


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


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
        bound.listen(1024)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise MlxpagedError(
                f"port {port} on {host} is held by {_holder_of(port)}; stop it, or use --port {_free_port(host, port)}"
            ) from error
        raise ConfigError(
            f"cannot listen on --host {host} --port {port}: {error.strerror}; try --host 127.0.0.1"
        ) from error
    return bound


def _holder_of(port: int) -> str:
    """The listening process, as far as this user may see it."""
    for process in psutil.process_iter(["pid", "name"]):
        try:
            found = any(
                held.status == psutil.CONN_LISTEN and held.laddr and held.laddr.port == port
                for held in process.net_connections(kind="tcp")
            )
        except psutil.Error:
            continue
        if found:
            return f"{process.info['name']} (pid {process.info['pid']})"
    return "a process of another user"


def _free_port(host: str, taken: int) -> int:
    """The next port that can be had now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(taken + 1, min(taken + 100, 65536)):
        with closing(socket.socket(family)) as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    return 0
