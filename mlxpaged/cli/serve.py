"""`mlxpaged serve`: one model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import DEFAULT_PORT
from ..errors import ConfigError, MlxpagedError
from . import options
from .exits import complain

if TYPE_CHECKING:
    from ..engine.service import EngineService
    from ..server.options import ServerOptions
    from ..server.parent import Handed

Host = Annotated[str, typer.Option("--host", envvar="MLXPAGED_HOST", help="Address to listen on.")]
Port = Annotated[
    int,
    typer.Option(
        "--port",
        envvar="MLXPAGED_PORT",
        parser=options.port_number,
        metavar="PORT",
        help="Port to listen on, 1 to 65535; 0 takes a free one.",
    ),
]
ServedNames = Annotated[
    list[str] | None,
    typer.Option("--served-model-name", envvar="MLXPAGED_SERVED_MODEL_NAME", help="A further name of the model."),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", envvar="MLXPAGED_ALLOWED_HOST", help="A further Host name to answer to."),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option("--cors-origin", envvar="MLXPAGED_CORS_ORIGIN", help="A web page's origin that may use the server."),
]
InsecureNoAuth = Annotated[
    bool,
    typer.Option("--insecure-no-auth", envvar="MLXPAGED_INSECURE_NO_AUTH", help="Listen beyond this machine, keyless."),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option("--api-key", envvar="MLXPAGED_API_KEY", help="A key that clients must send; may be repeated."),
]
ApiKeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", envvar="MLXPAGED_API_KEY_FILE", help="Keys, one a line.")
]
UnixSocket = Annotated[
    Path | None,
    typer.Option("--unix-socket", envvar="MLXPAGED_UNIX_SOCKET", help="Listen on this path instead of a port."),
]
Also = Annotated[
    list[str] | None,
    typer.Option("--also", envvar="MLXPAGED_ALSO", metavar="MODEL", help="A further model that requests may name."),
]
Switch = Annotated[
    str,
    typer.Option(
        "--on-switch",
        envvar="MLXPAGED_ON_SWITCH",
        help="A request for a model not in memory: wait for it (503 once running replies have held it up for five "
        "minutes), or retry (503 at once) [wait].",
        show_default=False,
    ),
]
IdleUnload = Annotated[
    float | None,
    typer.Option(
        "--idle-unload",
        envvar="MLXPAGED_IDLE_UNLOAD",
        min=1,
        metavar="SECONDS",
        help="Give the model's memory back after so long without a request.",
    ),
]
Restart = Annotated[
    bool,
    typer.Option(
        "--restart/--no-restart",
        envvar="MLXPAGED_RESTART",
        help="Go on with a new process when the one that serves is killed or crashes.",
    ),
]
IdleExit = Annotated[
    float | None,
    typer.Option(
        "--idle-exit",
        envvar="MLXPAGED_IDLE_EXIT",
        min=1,
        metavar="SECONDS",
        help="End after so long without a request.",
    ),
]


def serve(
    model: options.ModelArgument,
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
    served_model_name: ServedNames = None,
    allowed_host: AllowedHosts = None,
    cors_origin: CorsOrigins = None,
    insecure_no_auth: InsecureNoAuth = False,
    api_key: ApiKeys = None,
    api_key_file: ApiKeyFile = None,
    unix_socket: UnixSocket = None,
    also: Also = None,
    on_switch: Switch = "wait",
    idle_unload: IdleUnload = None,
    idle_exit: IdleExit = None,
    dtype: options.DtypeFlag = "auto",
    ctx: options.ContextFlag = None,
    max_num_seqs: options.MaxRows = 32,
    max_queue: options.MaxQueue = 512,
    step_budget: options.StepBudget = None,
    memory_budget: options.MemoryBudget = None,
    prefix_cache: options.PrefixCache = True,
    attention: options.AttentionFlag = "auto",
    restart: Restart = True,
) -> int:
    """Answer HTTP clients until Ctrl-C: OpenAI's chat, completions and models, Anthropic's messages."""
    from ..chat.servers import key_of, new_secret
    from ..server.options import ServerOptions
    from ..server.parent import handed
    from .defaults import complain_of_unread_keys
    from .keys import api_keys

    given = handed()
    if given is None:
        complain_of_unread_keys()

    config = options.engine_config(
        dtype,
        ctx,
        memory_budget,
        step_budget,
        attention,
        max_rows=max_num_seqs,
        max_queue=max_queue,
        prefix_cache=prefix_cache,
        idle_unload_s=idle_unload,
        kv_share=given.kv_share if given else 1.0,
    )
    if on_switch not in ("wait", "retry"):
        raise ConfigError(f"--on-switch is {on_switch!r}; it must be wait or retry")
    secret = given.secret if given else new_secret()
    keys = api_keys(api_key or (), api_key_file)
    server_options = ServerOptions(
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        insecure_no_auth=insecure_no_auth,
        api_keys=(*keys, key_of(secret)) if keys else (),  # this user's own faces need not be told a key
        on_switch="retry" if on_switch == "retry" else "wait",
        secret=secret,
        idle_exit_s=idle_exit,
    )
    if restart and given is None:
        return _as_parent(host, port, unix_socket, server_options)

    from ..chat.backend import LocalBackend
    from ..model.installed import known_models
    from ..server.lifecycle import serve as serve_until_stopped
    from .compose import started_engine

    with _own_server_named(port), started_engine(config) as service:
        listed = (model, *(also or ()))
        backend = LocalBackend(service, model, served_model_name or (), lambda: known_models(listed))
        serve_until_stopped(
            backend,
            host,
            port,
            server_options,
            lambda url: _beside(service, model, url, server_options, unix_socket, given),
            unix_socket,
            given.opened() if given else None,
            complain,
        )
    return 0


def _as_parent(host: str, port: int, unix_socket: Path | None, server_options: ServerOptions) -> int:
    """Hold the sockets, and let another process of the same command line do the rest."""
    from ..server.listening import listen, listen_unix
    from ..server.parent import Parent

    assert server_options.secret
    open_to_all = server_options.insecure_no_auth or bool(server_options.api_keys)
    with _own_server_named(port):
        sockets = listen(host, port, open_to_all) if unix_socket is None else [listen_unix(unix_socket)]
    try:
        return Parent([sys.executable, *sys.orig_argv[1:]], sockets, server_options.secret, complain).run()
    finally:
        for bound in sockets:
            bound.close()
        if unix_socket is not None:
            unix_socket.unlink(missing_ok=True)


@contextmanager
def _own_server_named(port: int) -> Iterator[None]:
    """Where the port turns out to be held by a server of this user, the error names it and what ends it."""
    try:
        yield
    except MlxpagedError as error:
        if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
            raise
        from .servers import own_server_at

        if (own := own_server_at(port)) is None:
            raise
        raise MlxpagedError(
            f"port {port} is held by your own mlxpaged server (pid {own.pid}); `mlxpaged stop` ends it, "
            "or use --port 0 for a free one"
        ) from error


async def _beside(
    service: EngineService,
    model: str,
    url: str,
    server_options: ServerOptions,
    unix_socket: Path | None,
    given: Handed | None,
) -> None:
    """What runs beside the server: it can be found by this user's faces, and the model is loaded."""
    import asyncio

    from ..chat.servers import ServerRecord, registered

    assert server_options.secret
    here = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    record = ServerRecord(
        given.pid if given else os.getpid(),
        here,
        server_options.secret,
        time.time(),
        str(unix_socket.resolve()) if unix_socket else None,
        server_options.idle_exit_s,
    )
    if given:
        asyncio.get_running_loop().add_reader(given.alive, _orphaned, given.alive)
    with ExitStack() as stack:
        try:
            stack.enter_context(registered(record))
        except OSError as error:
            complain(
                f"chat and tui will not find this server by themselves, only with --url {here}: "
                f"{error.filename} cannot be written ({error.strerror}); MLXPAGED_STATE names another folder"
            )
        await _load(service, model, f"{url}/v1" if unix_socket is None else f"the unix socket {unix_socket}")
        await asyncio.Event().wait()  # until the server's end cancels this


def _orphaned(alive: int) -> None:
    """The parent is gone, however it went: nobody passes signals on any more, so end as after the first one."""
    import asyncio

    asyncio.get_running_loop().remove_reader(alive)
    os.kill(os.getpid(), signal.SIGTERM)


async def _load(service: EngineService, model: str, place: str) -> None:
    """Loads the model while the server already answers /health and /v1/models, then says how to reach it."""
    import asyncio

    from .progress import REDRAW_S, LoadProgress, drawn

    progress = LoadProgress()
    loading = service.load(model, progress)
    try:
        with drawn(progress) as redraw:
            while not loading.done():
                redraw()
                await asyncio.sleep(REDRAW_S)
    finally:
        progress.abandoned = True
    info = loading.result()
    for note in info.notes:
        complain(note)
    complain(f"{info.name} is ready at {place} (context {info.context_len:,} tokens); Ctrl-C stops")
