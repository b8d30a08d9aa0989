"""A real server on a real socket: uvicorn in a thread, on 127.0.0.1 and a free port."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import pytest

from mlxpaged.chat.backend import LocalBackend
from mlxpaged.server.lifecycle import Server
from mlxpaged.server.listening import listen, url_of
from mlxpaged.server.options import ServerOptions
from tests.scripted import ScriptedService

STOPPING: list[threading.Thread] = []
"""Servers on their way out, which takes uvicorn a tenth of a second each; they are waited for together."""


@pytest.fixture(scope="session", autouse=True)
def every_server_ends() -> Iterator[None]:
    yield
    for thread in STOPPING:
        thread.join(20)
        assert not thread.is_alive()


@dataclass(frozen=True)
class Running:
    """A server that answers at `url`; `http` is a client of it without any of an SDK's manners."""

    url: str
    service: ScriptedService
    http: httpx.Client
    server: Server
    thread: threading.Thread


@contextmanager
def running_server(
    service: ScriptedService,
    options: ServerOptions | None = None,
    aliases: tuple[str, ...] = (),
    installed: tuple[str, ...] = (),
) -> Iterator[Running]:
    name = service.model.name if service.model else "scripted"
    backend = LocalBackend(service, name=name, aliases=aliases, installed=lambda: installed)
    sockets = listen("127.0.0.1", 0)
    url = url_of(sockets[0])
    server = Server(backend, options or ServerOptions())
    thread = threading.Thread(target=server.run_until_stopped, args=(sockets,))
    thread.start()  # the sockets listen already: a client that connects now only waits
    try:
        with httpx.Client(base_url=url, timeout=20, trust_env=False, verify=False) as http:
            yield Running(url, service, http, server, thread)
    finally:
        server.stop()
        service.close()
        STOPPING.append(thread)


Serve = Callable[..., Running]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers for one test: `serve(service, options=..., aliases=...)`; they end with it."""
    with ExitStack() as stack:
        yield lambda service=None, **more: stack.enter_context(running_server(service or ScriptedService(), **more))
