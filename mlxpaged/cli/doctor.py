"""`mlxpaged doctor`: is this machine ready, and what should its owner do? Owns the questions that need no mlx, what is
printed and the file that is written; what mlx must be asked lies in model/ and engine/."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import paths
from ..chat.foreign import neutralise
from ..config import DEFAULT_PORT, EngineConfig
from ..errors import ConfigError, MlxpagedError
from . import options
from .exits import complain
from .settings import settings_path

if TYPE_CHECKING:
    from ..model.finding import Finding
    from ..model.loader import LoadedModel
    from ..model.sources import ModelSource
    from ..model.startup import Startup

_LEAST_FREE = 2 << 30
_BUDGET_S = 480.0


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Also load this model and see how it is served.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Also measure, and write one file to share.")
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", min=1, metavar="SECONDS", help="Most time the measurements take [480].")
    ] = _BUDGET_S,
    dtype: options.DtypeFlag = "auto",
    attention: options.AttentionFlag = "auto",
) -> int:
    """Say what this machine is, what is wrong with it and what to do; the exit code is 1 when something is wrong."""
    config = options.engine_config(dtype, None, attention=attention)
    if report:
        _require_writable(report)
    startup, findings = _machine()
    findings += [settings_file(), cache_folder(), *own_folders(), port(), network()]
    loaded = None
    usable = not any(one.problem and one.name in {"mlx", "mlx-lm"} for one in findings)
    if usable:
        loaded, more = _model(model, config)
        findings += more
    _show(findings, as_json)
    if report and usable:
        _write_report(report, findings, (loaded, startup), budget, config)
    return int(any(one.problem for one in findings))


def _machine() -> tuple[Startup, list[Finding]]:
    """What this machine is; one problem where mlx cannot even be imported."""
    from ..model.startup import before_mlx

    startup = before_mlx()
    try:
        from ..model.machine import machine_findings
    except ImportError as error:
        from ..model.finding import Finding

        advice = "install it again: pip install --force-reinstall mlx (on Linux: 'mlx[cpu]')"
        return startup, [Finding("mlx", f"cannot be imported: {error}", advice, problem=True)]
    return startup, machine_findings(startup)


def settings_file() -> Finding:
    """Whether every command can use what config.toml holds."""
    from ..model.finding import Finding
    from .defaults import check_file, unread_keys

    file = settings_path()
    try:
        check_file()
        unread = unread_keys()
    except ConfigError as error:
        return Finding("settings", f"{file} is wrong", str(error), problem=True)
    advice = f"no command reads {', '.join(unread)}" if unread else None
    return Finding("settings", str(file) if file.exists() else f"no {file}", advice)


def cache_folder() -> Finding:
    """Whether files can be kept, and room for them."""
    import tempfile

    from ..model.finding import Finding

    folder = paths.cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        advice = f"make {folder} writable, or let MLXPAGED_CACHE name another folder"
        return Finding("cache folder", f"{folder} cannot be written: {error.strerror}", advice, problem=True)
    tight = f"little room is left for models beside {folder}" if free < _LEAST_FREE else None
    return Finding("cache folder", f"{folder}, {free / 2**30:.1f} GiB free", tight)


def own_folders() -> list[Finding]:
    """What of our own cannot be kept, each with what comes of it. Creates nothing."""
    from ..model.finding import Finding

    found = []
    for name, folder, loss, is_wrong in (
        ("state", paths.state_dir(), "chat and tui cannot start a server", True),
        ("data", paths.data_dir(), "no conversation is saved", True),
        ("config", paths.config_dir(), "`mlxpaged config set` cannot write", False),
    ):
        if reason := _unwritable(folder):
            advice = f"{loss}; make {folder} writable, or let MLXPAGED_{name.upper()} name another folder"
            value = f"{folder} cannot be written: {reason}"
            found.append(Finding(f"{name} folder", value, advice, problem=is_wrong))
    return found


def _unwritable(folder: Path) -> str | None:
    """Why `folder` takes no file, or cannot be made; None where all is well."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        return f"{there} is no folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} is read-only"


def port() -> Finding:
    """Whether `serve` could listen where it does by default."""
    from ..model.finding import Finding
    from ..server.lifecycle import listen
    from .servers import own_server_at

    try:
        for bound in listen("127.0.0.1", DEFAULT_PORT):
            bound.close()
    except MlxpagedError as error:
        if own := own_server_at(DEFAULT_PORT):
            return Finding("port", f"{DEFAULT_PORT} is your own server's (pid {own.pid})")
        return Finding("port", f"{DEFAULT_PORT} is taken", str(error))
    return Finding("port", f"{DEFAULT_PORT} is free")


def network() -> Finding:
    """Whether models may be fetched. Nothing is asked of the network itself."""
    from ..model.finding import Finding
    from ..model.smollm2 import smollm2_path

    here = "smollm2 is on this disk" if smollm2_path().is_file() else "smollm2 is not on this disk yet"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return Finding("models", f"offline, HF_HUB_OFFLINE is set: only what is on this disk; {here}")
    return Finding("models", f"fetched where they are not on this disk; {here}")


def _model(name: str | None, config: EngineConfig) -> tuple[LoadedModel | None, list[Finding]]:
    """How the model, or a typical one, would be served. It is loaded on this thread, which is MLX's from here on."""
    from ..model.finding import Finding
    from ..model.upstream import import_mlx_lm

    import_mlx_lm()
    from ..model.examine import examine, examine_typical

    if name is None:
        return None, examine_typical(config.attention, complain)
    try:
        source = _fetched(name)
    except MlxpagedError as error:
        return None, [Finding("model", f"{name} cannot be had", str(error), problem=True)]
    return examine(source, config.dtype, config.attention, complain)


def _fetched(name: str) -> ModelSource:
    from concurrent.futures import ThreadPoolExecutor

    from ..model.sources import resolve
    from .progress import LoadProgress, wait_with_bar

    progress = LoadProgress()
    with ThreadPoolExecutor(1) as executor:
        return wait_with_bar(executor.submit(resolve, name, progress), progress)


def _show(findings: list[Finding], as_json: bool) -> None:
    wrong = any(one.problem for one in findings)
    if as_json:
        values = [
            {"name": one.name, "value": one.value, "advice": one.advice, "problem": one.problem} for one in findings
        ]
        print(json.dumps({"ok": not wrong, "findings": values}))
        return
    width = max(len(one.name) for one in findings)
    for one in findings:
        mark = "x" if one.problem else "!" if one.advice else " "
        print(f"{mark} {one.name:<{width}}  {neutralise(one.value)}")
    advice = [one for one in findings if one.advice]
    print()
    if not advice:
        print("Nothing to do. Start with: mlxpaged chat")
        return
    print("To do:" if wrong else "Nothing is wrong. Worth knowing:")
    for one in advice:
        print(f"- {one.name}: {neutralise(str(one.advice))}")


def _require_writable(file: Path) -> None:
    """Found out before minutes of measuring."""
    if file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"--report {file} cannot be written; name a file in an existing folder, as in doctor.md")


def _write_report(
    file: Path,
    findings: list[Finding],
    subject: tuple[LoadedModel | None, Startup],
    budget_s: float,
    config: EngineConfig,
) -> None:
    from ..engine.report import Subject, make_report
    from ..model.measure import tiny_model
    from .report_page import as_markdown

    loaded, startup = subject
    complain(f"measuring for about {budget_s:.0f} s at most; Ctrl-C leaves no file")
    sections = make_report(Subject(loaded or tiny_model(), startup, budget_s, config.attention), on_progress=complain)
    partial = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        partial.write_text(as_markdown(findings, sections), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise ConfigError(f"--report {file} cannot be written: {error.strerror}; name another file") from error
    finally:
        with suppress(OSError):
            partial.unlink()
    complain(f"wrote {file}; read it before you share it")
