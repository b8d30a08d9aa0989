"""config.toml: a person's own defaults for flags. Owns its keys, reading it and changing one line of it.

A key is a flag's name with underscores: `temperature = 0.7` holds for every command that has --temperature, under a
heading such as [chat] for that command only. A flag wins over its MLXPAGED_* variable, that over this file. Under
[keys] an action of the full-screen app has its key.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from .. import paths
from ..errors import ConfigError

COMMANDS = ("chat", "tui", "run", "serve")
OWN_KEYS = ("model_folders",)
"""Keys that are no flags: folders in which `mlxpaged list` looks for more models."""


KEYS = "keys"
"""The heading of a person's own keys."""


def settings_path() -> Path:
    """The file."""
    return paths.config_dir() / "config.toml"


def settings() -> dict[str, Any]:
    """What the file holds. Raises ConfigError, naming the line, when it is no TOML."""
    file = settings_path()
    if not file.exists():
        return {}
    import tomllib

    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; correct it or move it away") from error


def defaults_by_command() -> dict[str, dict[str, Any]]:
    """What each command's flags are by default, as click takes it."""
    found = settings()
    common = {
        name: value for name, value in found.items() if not isinstance(value, dict) and name not in {*OWN_KEYS, KEYS}
    }
    return {name: {**common, **section_of(found, name)} for name in COMMANDS} if found else {}


def model_folders() -> list[Path]:
    """Folders to look for models in, besides the usual ones."""
    folders = settings().get("model_folders", [])
    if not isinstance(folders, list):
        raise ConfigError(f'model_folders in {settings_path()} must be a list such as ["~/my-models"]')
    return [Path(str(folder)).expanduser() for folder in folders]


def key_settings() -> dict[str, Any]:
    """What is written under [keys], unchecked."""
    return section_of(settings(), KEYS)


def get_setting(key: str) -> Any:
    """The value of `key` or `command.key`; None where it is not set."""
    section, _, name = key.rpartition(".")
    found = settings()
    return (section_of(found, section) if section else found).get(name)


def set_setting(key: str, text: str | None) -> None:
    """Write `key` (or `command.key`) with the TOML value or plain text `text`; None takes it out. Every other line of
    the file stays as it is."""
    import tomllib

    section, _, name = key.rpartition(".")
    file = settings_path()
    before = file.read_text(encoding="utf-8") if settings() else ""
    line = None if text is None else f"{name} = {_as_toml(text)}"
    after = _with_line(before, section, name, line)
    found = tomllib.loads(after)
    value = (section_of(found, section) if section else found).get(name)
    if value != (None if text is None else parsed(text)):
        raise ConfigError(f"{file} has {key} in a form that is not changed here; edit it by hand")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = file.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
            out.write(after)
        fresh.replace(file)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; MLXPAGED_CONFIG names another folder") from error


def section_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    """What stands under the heading `name`."""
    section = found.get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{name} in {settings_path()} must be a heading: [{name}]")
    return section


def parsed(text: str) -> Any:
    """The value that `set_setting` writes for this text."""
    import tomllib

    return tomllib.loads(f"x = {_as_toml(text)}")["x"]


def _as_toml(text: str) -> str:
    """A TOML value as it stands, or the text as a TOML string."""
    import tomllib

    try:
        parsed = tomllib.loads(f"x = {text}")
        if set(parsed) == {"x"} and not isinstance(parsed["x"], dict) and "\n" not in text:
            return text
    except ValueError:
        pass
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


def _with_line(before: str, section: str, name: str, line: str | None) -> str:
    """The file's text with `line` in place of the one that sets `name` under `section`, or added to it."""
    lines = before.splitlines()
    start, end = _bounds(lines, section)
    if start is None:
        return before if line is None else "\n".join([*lines, *([""] if lines else []), f"[{section}]", line, ""])
    key = re.compile(rf"\s*(?:{re.escape(name)}|\"{re.escape(name)}\")\s*=")
    at = next((index for index in range(start, end) if key.match(lines[index])), None)
    if at is not None:
        lines[at : at + 1] = [] if line is None else [line]
    elif line is not None:
        while end > start and not lines[end - 1].strip():
            end -= 1
        lines.insert(end, line)
    return "\n".join(lines) + "\n" if lines else ""


def _bounds(lines: list[str], section: str) -> tuple[int | None, int]:
    """(first line, line after the last) of a section; the part above every heading is the section ''."""
    heading = re.compile(r"\s*\[([^\[\]]+)\]")
    marks = [(index, match[1].strip()) for index, line in enumerate(lines) if (match := heading.match(line))]
    starts = [(0, ""), *((index + 1, name) for index, name in marks)]
    ends = [*(index for index, _ in marks), len(lines)]
    for (start, name), end in zip(starts, ends, strict=True):
        if name == section:
            return start, end
    return None, len(lines)
