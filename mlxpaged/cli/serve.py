"""`mlxpaged serve`: one model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import DEFAULT_PORT
from . import options
from .exits import complain

if TYPE_CHECKING:
    from ..engine.service import EngineService
    from ..server.app import ServerOptions

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
    """Answer HTTP clients until Ctrl-C: /v1/chat/completions, /v1/completions, /v1/models."""
    from ..chat.backend import LocalBackend
    from ..chat.servers import new_secret
    from ..server.app import ServerOptions
    from ..server.lifecycle import serve as serve_until_stopped
    from .compose import started_engine

    config = options.engine_config(
        dtype,
        ctx,
        memory_budget,
        step_budget,
        attention,
        max_rows=max_num_seqs,
        max_queue=max_queue,
        prefix_cache=prefix_cache,
    )
    server_options = ServerOptions(
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        insecure_no_auth=insecure_no_auth,
        secret=new_secret(),
        idle_exit_s=idle_exit,
    )
    with started_engine(config) as service:
        backend = LocalBackend(service, name=model, aliases=served_model_name or ())
        serve_until_stopped(
            backend, host, port, server_options, lambda url: _beside(service, model, url, server_options)
        )


async def _beside(service: EngineService, model: str, url: str, server_options: ServerOptions) -> None:
    """What runs beside the server: it can be found by this user's faces, and the model is loaded."""
    from ..chat.servers import ServerRecord, registered

    assert server_options.secret
    here = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    record = ServerRecord(os.getpid(), here, server_options.secret, time.time(), idle_exit_s=server_options.idle_exit_s)
    with ExitStack() as stack:
        try:
            stack.enter_context(registered(record))
        except OSError as error:
            complain(
                f"chat and tui will not find this server by themselves, only with --url {here}: "
                f"{error.filename} cannot be written ({error.strerror}); MLXPAGED_STATE names another folder"
            )
        await _load(service, model, url)
        await asyncio.Event().wait()  # until the server's end cancels this


async def _load(service: EngineService, model: str, url: str) -> None:
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
    complain(f"{info.name} is ready at {url}/v1 (context {info.context_len:,} tokens); Ctrl-C stops")
