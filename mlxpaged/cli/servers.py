"""`mlxpaged ps`, `stop` and `load`: this user's servers on this machine, and what they hold."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, MlxpagedError, ModelNotFound, Unreachable
from . import options
from .exits import complain
from .listing import age, columns

if TYPE_CHECKING:
    from ..chat.remote import RemoteBackend
    from ..chat.servers import ServerRecord

_STOP_S = 20.0
_TOLD_AFTER_S = 1.0
_STATES = {"waiting": "waits"}
_NONE = "no server of yours runs; `mlxpaged serve MODEL` or `mlxpaged chat` starts one"

AsJson = Annotated[bool, typer.Option("--json", help="One JSON list.")]
Estimate = Annotated[bool, typer.Option("--estimate", help="Load nothing; say what it would take and whether it fits.")]
EstimateJson = Annotated[bool, typer.Option("--json", help="The estimate as one JSON object.")]
StopModel = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="Unload this model only; without one the server ends.")
]


def ps(as_json: AsJson = False) -> None:
    """List your servers and what they hold."""
    import asyncio

    found = asyncio.run(_looked_at())
    if as_json:
        print(json.dumps(found))
        return
    rows = [
        (
            str(one["pid"]),
            one["url"],
            ", ".join(_model_words(model) for model in one["models"]),
            f"{one['running']} running, {one['waiting']} waiting",
            f"{one['kv_bytes'] / 2**20:,.0f} MiB",
            age(one["started"]).removesuffix(" ago"),
            f"ends after {one['idle_exit_s'] / 60:.0f} idle min" if one["idle_exit_s"] else "",
        )
        for one in found
    ]
    for line in columns(("PID", "URL", "MODEL", "REQUESTS", "K/V", "UP", ""), rows) or [_NONE]:
        print(line)


def stop(model: StopModel = None, url: options.Url = None, api_key: options.ApiKey = None) -> None:
    """End your servers, or unload one model."""
    import asyncio

    if model or url:
        asyncio.run(_unload(model, url, api_key))
        return
    asyncio.run(_end())


def load(
    model: options.ModelArgument,
    estimate: Estimate = False,
    as_json: EstimateJson = False,
    url: options.Url = None,
    api_key: options.ApiKey = None,
    dtype: options.DtypeFlag = "auto",
    ctx: options.ContextFlag = None,
    max_num_seqs: options.MaxRows = 32,
    step_budget: options.StepBudget = None,
    memory_budget: options.MemoryBudget = None,
) -> int:
    """Load a model into your server, or say what it would take.

    Where no server runs, one is started in the background. The flags that say how a model is held go with --estimate.
    """
    if estimate:
        from .estimate import show_estimate

        config = options.engine_config(dtype, ctx, memory_budget, step_budget, max_rows=max_num_seqs)
        return show_estimate(model, config, as_json)
    if as_json:
        raise ConfigError("--json goes with --estimate; add --estimate, or leave it out")

    import asyncio

    from ..chat.attach import attach
    from .progress import told

    async def work() -> None:
        attached = await attach(model, url, api_key, on_status=lambda text: None)
        try:
            if attached.notice:
                complain(attached.notice)
            with told() as tell:
                card = await attached.ready(tell)
            complain(f"{card.name} is ready at {attached.backend.url}/v1 (context {card.context_len or 0:,} tokens)")
        finally:
            await attached.close()

    asyncio.run(work())
    return 0


def own_server_at(port: int) -> ServerRecord | None:
    """This user's server that listens on the port of this machine, if there is one."""
    import asyncio
    from urllib.parse import urlsplit

    from ..chat.servers import proven

    found = asyncio.run(proven())
    return next((one for one in found if one.socket is None and urlsplit(one.url).port == port), None)


async def _looked_at() -> list[dict[str, Any]]:
    import asyncio

    from ..chat.servers import proven

    return list(await asyncio.gather(*(_look(record) for record in await proven())))


async def _look(record: ServerRecord) -> dict[str, Any]:
    """One server as `ps --json` shows it; zeros where it is too busy to say."""
    backend = _backend(record)
    about: dict[str, Any] = {
        "pid": record.pid,
        "url": record.url,
        "socket": record.socket,
        "started": record.started,
        "idle_exit_s": record.idle_exit_s,
        "models": [],
        "running": 0,
        "waiting": 0,
        "kv_bytes": 0,
    }
    try:
        with suppress(MlxpagedError):
            cards = [card for card in await backend.models() if card.state != "unloaded"]
            told = ("name", "state", "context_len", "quantisation")
            about["models"] = [{name: getattr(card, name) for name in told} for card in cards]
            stats = await backend.stats()
            about |= {"running": stats.num_running, "waiting": stats.num_waiting, "kv_bytes": stats.memory_bytes}
    finally:
        await backend.close()
    return about


def _model_words(model: dict[str, Any]) -> str:
    remark = model["quantisation"] if model["state"] == "ready" else _STATES.get(model["state"], model["state"])
    return f"{model['name']} ({remark})" if remark else model["name"]


async def _end() -> None:
    import asyncio

    from ..chat.servers import gone, processes_of, proven

    found = await proven()
    if not found:
        complain(_NONE)
    processes = [processes_of(record) for record in found]
    for record in found:
        with suppress(ProcessLookupError):  # it ended by itself meanwhile
            os.kill(record.pid, signal.SIGTERM)
    ended = await asyncio.gather(
        *(gone(record, family, _STOP_S) for record, family in zip(found, processes, strict=True))
    )
    for record, done in zip(found, ended, strict=True):
        if done:
            complain(f"stopped the server at {record.url} (pid {record.pid})")
    _complain_of([record for record, done in zip(found, ended, strict=True) if not done])


def _complain_of(left: Sequence[ServerRecord]) -> None:
    if left:
        pids = " ".join(str(record.pid) for record in left)
        raise MlxpagedError(f"still finishing their replies after {_STOP_S:.0f} s; `kill -9 {pids}` ends them at once")


async def _unload(model: str | None, url: str | None, api_key: str | None) -> None:
    import asyncio

    from ..chat.remote import RemoteBackend
    from ..chat.servers import proven

    if model is None:
        raise MlxpagedError("a server at --url is ended where it was started; name a model to unload it there")
    backends = [RemoteBackend(url, None, api_key)] if url else [_backend(record) for record in await proven()]
    if not backends:
        raise Unreachable(_NONE)
    try:
        held = await asyncio.gather(*(_held(backend) for backend in backends))
        holders = [backend for backend, names in zip(backends, held, strict=True) if model in names]
        if not holders:
            words = (f"{one.url} holds {', '.join(names) or 'none'}" for one, names in zip(backends, held, strict=True))
            raise ModelNotFound(f"{model} is not in memory: the server at {'; the one at '.join(words)}")
        for backend in holders:
            await _unload_at(backend, model)
    finally:
        for backend in backends:
            await backend.close()


async def _unload_at(backend: RemoteBackend, model: str) -> None:
    """Unload there, with a word where replies are waited for."""
    import asyncio

    unloading = asyncio.ensure_future(backend.unload(model))
    await asyncio.wait([unloading], timeout=_TOLD_AFTER_S)
    if not unloading.done():
        complain(f"waiting for the replies that {model} is writing at {backend.url}")
    await unloading
    complain(f"{model} is unloaded at {backend.url}")


async def _held(backend: RemoteBackend) -> list[str]:
    """The names of what is in memory there."""
    return [card.name for card in await backend.models() if card.state == "ready"]


def _backend(record: ServerRecord) -> RemoteBackend:
    from ..chat.remote import RemoteBackend

    return RemoteBackend(record.url, None, record.key(), record.transport())
