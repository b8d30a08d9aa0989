"""`mlxpaged config` and `mlxpaged completions`: a person's own defaults, and the shell's help with typing."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..tui.keymap import keys_from, known_action
from .defaults import check_setting, flag_names
from .exits import complain
from .settings import COMMANDS, KEYS, OWN_KEYS, get_setting, key_settings, parsed, set_setting, settings, settings_path

config = typer.Typer(
    name="config",
    help="Your own defaults: config.toml.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Key = Annotated[
    str, typer.Argument(metavar="KEY", help="A flag's name, as in temperature or chat.temperature; or keys.ACTION.")
]
_SHELLS = ("bash", "zsh", "fish")


@config.command("get")
def get(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="One of them [all]; `keys`: every key of the app.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for scripts.")] = False,
) -> None:
    """Print what is set."""
    if key is None:
        found = settings()
        print(json.dumps(found)) if as_json else _print_all(found)
        return
    if key == KEYS:
        in_force = {name: ",".join(keys) for name, keys in keys_from(key_settings()).by_action.items()}
        print(json.dumps(in_force)) if as_json else _print_all({KEYS: in_force})
        return
    value = get_setting(_known(key))
    if value is None:
        raise ConfigError(f"{key} is not set; `mlxpaged config set {key} VALUE` sets it")
    print(json.dumps(value) if as_json or isinstance(value, list | bool) else value)


@config.command("set")
def set_(
    key: Key,
    value: Annotated[
        str | None, typer.Argument(metavar="VALUE", help="A number, a word, true, or a TOML list.")
    ] = None,
    unset: Annotated[bool, typer.Option("--unset", help="Take it out again.")] = False,
) -> None:
    """Set a default for a flag, for every command or for one."""
    if unset == (value is not None):
        raise ConfigError(f"give a value, as in `mlxpaged config set {key} VALUE`, or --unset")
    known = _known(key)
    if value is not None:
        check_setting(known, parsed(value))
    set_setting(known, value)
    _complain_of_keys(known)


@config.command("unset")
def unset(key: Key) -> None:
    """Take a default out again."""
    written = key if get_setting(key) is not None else _known(key)  # what no command reads can be taken out too
    if get_setting(written) is None:
        raise ConfigError(f"{written} is not set")
    set_setting(written, None)
    _complain_of_keys(written)


def _complain_of_keys(known: str) -> None:
    """What a change under [keys] does to other actions."""
    for line in keys_from(key_settings()).complaints if known.startswith(f"{KEYS}.") else ():
        complain(line)


@config.command("path")
def path() -> None:
    """Print where config.toml is."""
    print(settings_path())


def completions(shell: Annotated[str, typer.Argument(metavar="SHELL", help=f"One of {', '.join(_SHELLS)}.")]) -> None:
    """Print a completion script for your shell.

    Put it into the shell's start-up file, as in: mlxpaged completions zsh >> ~/.zshrc
    """
    if shell not in _SHELLS:
        raise ConfigError(f"there are no completions for {shell!r}; name one of {', '.join(_SHELLS)}")
    from typer.completion import get_completion_script

    print(get_completion_script(prog_name="mlxpaged", complete_var="_MLXPAGED_COMPLETE", shell=shell))


def _print_all(found: dict[str, Any], before: str = "") -> None:
    for name, value in found.items():
        if isinstance(value, dict):
            _print_all(value, f"{before}{name}.")
        else:
            print(f"{before}{name} = {json.dumps(value, ensure_ascii=False)}")


def _known(key: str) -> str:
    """The key with underscores; ConfigError where no command has such a flag, and the app no such action."""
    section, _, name = key.rpartition(".")
    name = name.removeprefix("--").replace("-", "_")
    if section == KEYS:
        return f"{section}.{known_action(name)}"
    if section and section not in COMMANDS:
        raise ConfigError(
            f"{section!r} is no command with settings; write one of {', '.join((*COMMANDS, KEYS))} before the dot"
        )
    flags = flag_names()
    if name not in (set().union(*flags.values(), OWN_KEYS) if not section else flags[section]):
        near = sorted(other for other in set().union(*flags.values()) if other.startswith(name[:3]))
        hint = f"did you mean {', '.join(near)}?" if near else "`mlxpaged chat --help` names the flags"
        raise ConfigError(f"there is no setting {name}; {hint}")
    return f"{section}.{name}" if section else name
