"""config.toml against the flags that it sets: which keys there are, and whether a value fits its flag. Owns what is
said about one that does not; reads and writes the file through settings.py alone."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from functools import cache
from typing import Any

import typer

from ..errors import ConfigError
from ..tui.keymap import keys_from, keys_of
from .exits import complain
from .options import check_flag
from .settings import (
    COMMANDS,
    KEYS,
    OWN_KEYS,
    defaults_by_command,
    key_settings,
    model_folders,
    section_of,
    settings,
    settings_path,
)

HEADINGS = frozenset({*COMMANDS, KEYS})
NEEDED_BY = frozenset({*COMMANDS, "bench", "load", "pull"})
"""Commands that do not start with a config.toml that is wrong; every other one works without it."""


def flag_names() -> dict[str, set[str]]:
    """The names of each command's flags and arguments."""
    return {command: {str(one.name) for one in _command(command).params} for command in COMMANDS}


def check_setting(key: str, value: Any) -> None:
    """Raises ConfigError where no command that `key` (or `command.key`) is for can take `value`."""
    section, _, name = key.rpartition(".")
    if section == KEYS:
        keys_of(name, value)
        return
    if name in OWN_KEYS:
        if not isinstance(value, list):
            raise ConfigError(f'{name} cannot be {value!r}: it must be a list such as ["~/my-models"]')
        return
    commands = [section] if section else [command for command in COMMANDS if name in flag_names()[command]]
    reasons = [_misfit(command, name, value) for command in commands]
    if reasons and all(reasons):
        raise ConfigError(f"{key} cannot be {_shown(name, value)}: {reasons[0]}")


def check_file() -> None:
    """Raises ConfigError, naming the file, at the first thing in it that some command cannot use."""
    for command in COMMANDS:
        defaults_for(command)
    model_folders()
    if wrong := keys_from(key_settings()).complaints:
        raise ConfigError(f"[keys] in {settings_path()}: {'; '.join(wrong)}")


def unread_keys() -> list[str]:
    """What stands in the file and no command reads, each with what may have been meant. Names under [keys] are the
    full-screen app's to check."""
    flags = flag_names()
    told = []
    for name, value in settings().items():
        if name in COMMANDS and isinstance(value, dict):
            told += [_unread(key, flags[name], f"{name}.{{}}") for key in value if key not in flags[name]]
        elif name not in HEADINGS and value != {}:
            known = HEADINGS if isinstance(value, dict) else set().union(*flags.values(), OWN_KEYS)
            told += [] if name in known else [_unread(name, known, "[{}]" if isinstance(value, dict) else "{}")]
    return told


def complain_of_unread_keys() -> None:
    """One line on stderr where the file holds what no command reads."""
    if told := unread_keys():
        complain(f"no command reads this in {settings_path()}: {', '.join(told)}")


def defaults_for(command: str | None) -> dict[str, dict[str, Any]]:
    """Every command's defaults, as click takes them; those of `command` fit its flags. Raises ConfigError, naming the
    file and the key, where one does not."""
    found = defaults_by_command()
    if command not in found:
        return found
    own = section_of(settings(), command)
    for name, value in found[command].items():
        if reason := _misfit(command, name, value):
            key = f"{command}.{name}" if name in own else name
            wrong = f"{settings_path()} has {key} = {_shown(name, value)}: {reason}"
            raise ConfigError(f"{wrong}; `mlxpaged config set {key} VALUE` changes it")
    return found


def _unread(name: str, known: Collection[str], form: str) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return form.format(name) + (f" (did you mean {form.format(near[0])}?)" if near else "")


def _misfit(command: str, name: str, value: Any) -> str | None:
    """Why this command's flag cannot have the value; None: it can, or there is no such flag."""
    about = _command(command)
    flag = next((one for one in about.params if one.name == name), None)
    if flag is None:
        return None
    context, several = typer.Context(about), getattr(flag, "multiple", False)
    if isinstance(value, list) != several:
        return f"it must be {'a list' if several else 'one value'} for `mlxpaged {command}`"
    words = [str(one) for one in value] if several else str(value)  # as on a line: 0.5 is no whole number
    try:
        check_flag(name, flag.process_value(context, words))
    except typer.BadParameter as error:
        return error.message.rstrip(".")
    except ConfigError as error:
        return str(error)
    return None


def _shown(name: str, value: Any) -> str:
    """The value as an error may tell it: doctor's report is made to be shared."""
    return "(a key)" if name == "api_key" else repr(value)


@cache
def _command(name: str) -> Any:
    """A command as click knows it."""
    from .app import app

    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
