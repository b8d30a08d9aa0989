"""The command tree. Owns which commands exist and the options before them; a command's body lives in its own file
and imports what is heavy when it runs, so that --help stays quick."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from .bench import bench
from .chat import chat
from .config import completions, config
from .defaults import NEEDED_BY, complain_of_unread_keys, defaults_for
from .doctor import doctor
from .exits import complain, exit_code_of, fill_missing_streams
from .logs import logged_to
from .models import copy, list_models, pull, remove, show
from .run import run
from .serve import serve
from .servers import load, ps, stop
from .sessions import sessions
from .tui import tui
from .variables import NamingVariables
from .version import version

app = typer.Typer(
    name="mlxpaged",
    help="Run language models on this machine: several live conversations share one paged K/V pool.",
    epilog="Start with: mlxpaged chat",
    add_completion=False,
    rich_markup_mode=None,  # plain help: half the time, and [brackets] stay as written
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", envvar="MLXPAGED_DEBUG", help="Show tracebacks.")] = False,
    show_version: Annotated[bool, typer.Option("--version", help="Say the version and leave.")] = False,
) -> None:
    """Options before the command; without a command: a short help."""
    if show_version:
        version(as_json=False)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command("chat")(chat)
app.command("tui")(tui)
app.command("run")(run)
app.command("serve")(serve)
app.command("ps")(ps)
app.command("stop")(stop)
app.command("pull")(pull)
app.command("list")(list_models)
app.command("ls", hidden=True)(list_models)
app.command("show")(show)
app.command("rm")(remove)
app.command("cp")(copy)
app.command("load")(load)
app.add_typer(sessions)
app.add_typer(bench, name="bench")
app.command("doctor")(doctor)
app.add_typer(config)
app.command("completions")(completions)
app.command("version")(version)
for registered in (*app.registered_commands, *bench.registered_commands):
    registered.cls = NamingVariables


def run_command_line(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code; everything it has to say has been said by then."""
    fill_missing_streams()
    debug = "--debug" in arguments[:1] or bool(os.environ.get("MLXPAGED_DEBUG"))
    with logged_to(complain, debug):
        return exit_code_of(lambda: _run(list(arguments)), debug=debug)


def _run(arguments: list[str]) -> object:
    if "_MLXPAGED_COMPLETE" in os.environ:  # the shell asks what could come next; see `completions`
        from typer.completion import completion_init

        completion_init()
    return app(arguments, prog_name="mlxpaged", standalone_mode=False, default_map=_defaults(arguments))


def _defaults(arguments: list[str]) -> dict[str, dict[str, Any]]:
    """A person's own defaults; a config.toml that is wrong ends only the commands that need it, and no --help."""
    command = next((word for word in arguments if not word.startswith("-")), None)
    needed = command in NEEDED_BY and not {"-h", "--help"} & set(arguments)
    try:
        found = defaults_for(command)
        if needed and command != "serve":  # which is two processes: the first one tells
            complain_of_unread_keys()
        return found
    except ConfigError:
        if needed:
            raise
        return {}
