"""`mlxpaged serve`: one model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import DEFAULT_PORT
from ..errors import ConfigError
from . import options
from .exits import complain

if TYPE_CHECKING:
    from ..engine.service import EngineService
    from ..server.options import ServerOptions

Host = Annotated[str, typer.Option("--host", envvar="MLXPAGED_HOST", help="Address to listen on.")]
Port = Annotated[
    int, typer.Option("--port", envvar="MLXPAGED_PORT", min=0, max=65535, help="Port to listen on; 0 takes a free one.")
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
        help="A request for a model not in memory: wait for it, or retry (503 at once) [wait].",
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
) -> None:
    """Answer HTTP clients until Ctrl-C: OpenAI's chat, completions and models, Anthropic's messages."""
    from ..chat.backend import LocalBackend
    from ..chat.servers import new_secret
    from ..model.installed import known_models
    from ..server.lifecycle import serve as serve_until_stopped
    from ..server.options import ServerOptions
    from .compose import started_engine
    from .keys import api_keys

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
    )
    if on_switch not in ("wait", "retry"):
        raise ConfigError(f"--on-switch is {on_switch!r}; it must be wait or retry")
    server_options = ServerOptions(
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        insecure_no_auth=insecure_no_auth,
        api_keys=api_keys(api_key or (), api_key_file),
        on_switch="retry" if on_switch == "retry" else "wait",
        secret=new_secret(),
        idle_exit_s=idle_exit,
    )
    with started_engine(config) as service:
        listed = (model, *(also or ()))
        backend = LocalBackend(service, model, served_model_name or (), lambda: known_models(listed))
        serve_until_stopped(
            backend,
            host,
            port,
            server_options,
            lambda url: _beside(service, model, url, server_options, unix_socket),
            unix_socket,
        )


async def _beside(
    service: EngineService, model: str, url: str, server_options: ServerOptions, unix_socket: Path | None
) -> None:
    """What runs beside the server: it can be found by this user's faces, and the model is loaded."""
    from ..chat.servers import ServerRecord, registered

    assert server_options.secret
    here = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    record = ServerRecord(
        os.getpid(),
        here,
        server_options.secret,
        time.time(),
        str(unix_socket.resolve()) if unix_socket else None,
        server_options.idle_exit_s,
    )
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


async def _load(service: EngineService, model: str, place: str) -> None:
    """Loads the model while the server already answers /health and /v1/models, then says how to reach it."""
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
