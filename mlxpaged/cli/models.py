"""`mlxpaged pull`, `list`, `show`, `rm` and `cp`: the models on this disk. Loads none, and imports no mlx but for
`show`, which tells what K/V takes on this machine."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError, MlxpagedError
from . import options
from .exits import complain
from .listing import columns, size
from .progress import LoadProgress, wait_with_bar
from .settings import model_folders

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..model.describe import Description
    from ..model.shelf import OnDisk
    from ..model.sources import ModelSource, Progress

_REPORT_S = 0.5

AsJson = Annotated[bool, typer.Option("--json", help="JSON, for scripts.")]
PullName = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="A hub id (org/name or org/name@revision), or smollm2.")
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Say nothing.")]


def pull(model: PullName = None, quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Fetch a model and check it.

    Goes on where an earlier try stopped. Without MODEL: a list of models to begin with.
    """
    from ..model.pull import pull as fetch
    from .compose import in_a_daemon_thread

    if model is None:
        _print_first_models(as_json)
        return
    if as_json or quiet:
        pulled = fetch(model, _JsonLines() if as_json else None)
    else:
        progress = LoadProgress()
        try:
            pulled = wait_with_bar(in_a_daemon_thread(lambda: fetch(model, progress)), progress)
        finally:
            progress.abandoned = True
    about = {"name": model, "path": str(pulled.path), "bytes": pulled.num_bytes, "files_checked": pulled.num_checked}
    if as_json:
        print(json.dumps({"done": True, **about}), flush=True)
    elif not quiet:
        complain(f"{model} is on this disk ({size(pulled.num_bytes)}, {pulled.num_checked} files checked)")


def list_models(as_json: AsJson = False) -> None:
    """List the models on this disk.

    Also those that other programs put there; nothing is copied.
    """
    from ..model.kept import aliases
    from ..model.shelf import models_on_disk

    found = models_on_disk(_own_folders())
    names = aliases()
    if as_json:
        listed = [asdict(one) | {"path": str(one.path), "aliases": _aliases_of(one, names)} for one in found]
        print(json.dumps(listed))
        return
    rows = [(_short(one.name), size(one.num_bytes), one.source, " ".join(_aliases_of(one, names))) for one in found]
    for line in columns(("MODEL", "SIZE", "FROM", "ALIAS"), rows):
        print(line)
    if not found:
        complain("no models on this disk yet; `mlxpaged pull` names some to begin with")


def _own_folders() -> list[Path]:
    try:
        return model_folders()
    except ConfigError as error:
        complain(f"{error}; listed without your model_folders")
        return []


def show(model: options.ModelArgument, dtype: options.DtypeFlag = "auto", as_json: AsJson = False) -> None:
    """Say what a model is and what it takes."""
    from ..model.describe import describe
    from ..model.sources import resolve

    config = options.engine_config(dtype, None)
    source = resolve(model, fetch=False)
    about, kv = describe(source), _kv_of(source, config)
    if as_json:
        own = {"path": str(about.path), "kv_bytes_per_token": kv and kv[0], "kv_bytes_per_context": kv and kv[1]}
        print(json.dumps(asdict(about) | own))
        return
    for name, value in _facts(about, kv):
        print(f"{name:13}{value}")


def _kv_of(source: ModelSource, config: EngineConfig) -> tuple[int, int] | None:
    """Bytes of K/V that a token and a full context take here; None for a model that cannot be loaded."""
    from ..model.startup import before_mlx

    before_mlx()
    from ..model.estimate import step_budget, unread_need
    from ..model.kvplan import row_bytes

    try:
        need, _ = unread_need(source, config.dtype)
    except MlxpagedError:  # what is wrong is told when it is loaded; its files are described all the same
        return None
    whole = row_bytes(need.groups, need.context_len, step_budget(config).most)
    return need.token_bytes, whole + need.fixed_bytes


def remove(models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names or aliases.")]) -> None:
    """Delete downloaded models, or aliases."""
    from ..model.kept import aliases, drop_alias
    from ..model.pull import remove as delete

    for model in models:
        if model in aliases():
            drop_alias(model)
            complain(f"the alias {model} is gone; the model stays")
        else:
            complain(f"{model} is gone; {size(delete(model))} are free again")


def copy(
    model: options.ModelArgument, alias: Annotated[str, typer.Argument(metavar="ALIAS", help="A short name for it.")]
) -> None:
    """Give a model a second name; nothing is copied."""
    from ..model.kept import set_alias
    from ..model.sources import resolve

    source = resolve(model, fetch=False)
    path = Path(model).expanduser()
    # A link at the end stays one: what the hub's cache links to has no suffix that says what it is.
    set_alias(alias, str(path.parent.resolve() / path.name) if path.exists() else source.name)
    complain(f"{alias} now means {model}")


class _JsonLines:
    """Progress as JSON lines on stdout, a few a second."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now >= self._next or progress.done_bytes == progress.total_bytes:
            self._next = now + _REPORT_S
            print(json.dumps(asdict(progress)), flush=True)


def _facts(about: Description, kv: tuple[int, int] | None) -> list[tuple[str, str]]:
    """Name and value of every line of `show`."""
    context = f"{about.context_len:,} tokens" if about.context_len else "-"
    facts = [
        ("model", about.name),
        ("family", about.family or "-"),
        ("weights", f"{size(about.num_bytes)}, {about.quantisation or 'as stored'}, {about.kind}"),
        ("layers", str(about.num_layers or "-")),
        ("context", context),
        (
            "template",
            f"{about.template_bytes:,} characters" if about.template_bytes else "none: plain completions only",
        ),
        ("memory", _memory(about, kv)),
        ("served", f"is decided when it is loaded; `mlxpaged doctor {about.name}` says how and checks it"),
        ("path", str(about.path)),
    ]
    return facts


def _memory(about: Description, kv: tuple[int, int] | None) -> str:
    plan = f"{size(about.num_bytes)} of weights on disk"
    if kv:
        token, whole = kv
        plan += f", K/V {size(token * 1000)} per 1,000 tokens ({size(whole)} for a full context)"
    return f"{plan}; `mlxpaged load {about.name} --estimate` says what it takes on this machine"


def _print_first_models(as_json: bool) -> None:
    import psutil

    from .first_models import FIRST_MODELS, fitting

    memory = psutil.virtual_memory().total
    fits = {one.name for one in fitting(memory)}
    if as_json:
        print(json.dumps([asdict(one) | {"fits": one.name in fits} for one in FIRST_MODELS]))
        return
    rows = [(one.name, f"{one.gigabytes} GB", one.remark) for one in FIRST_MODELS if one.name in fits]
    for line in columns(("TO BEGIN WITH", "SIZE", ""), rows):
        print(line)
    complain(f"these fit the {memory / 2**30:.0f} GB of this machine; `mlxpaged pull NAME` fetches one")


def _aliases_of(one: OnDisk, aliases: dict[str, str]) -> list[str]:
    whole = str(one.path.resolve())  # a file is listed once, however many paths lead to it
    return sorted(alias for alias, model in aliases.items() if model == one.name or os.path.realpath(model) == whole)


def _short(name: str) -> str:
    home = str(Path.home())
    return f"~{name[len(home) :]}" if name.startswith(f"{home}/") else name
