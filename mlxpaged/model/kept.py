"""What is remembered about models: names that a person gave them, and which ones were downloaded by us. Owns one small
file in the data folder; touches no model."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import paths
from ..errors import ConfigError

_ALIAS = re.compile(r"[\w][\w.:-]*")
_RESERVED = {"default"}


def kept_path() -> Path:
    """The file."""
    return paths.data_dir() / "models.json"


def aliases() -> dict[str, str]:
    """Alias -> the model it stands for."""
    return _strings(_read().get("aliases"))


def set_alias(alias: str, model: str) -> None:
    """Let `alias` stand for `model`. Raises ConfigError for a name that means something else, or an unwritable file."""
    if alias == "smollm2":
        raise ConfigError("smollm2 is the name of the embedded model; choose another, such as qwen or my-model")
    if not _ALIAS.fullmatch(alias) or alias in _RESERVED or alias.endswith(".gguf"):
        raise ConfigError(
            f"{alias!r} cannot be an alias; use letters, digits, dots and dashes, such as qwen or my-model"
        )
    _change(lambda kept: kept.setdefault("aliases", {}).update({alias: model}))


def drop_alias(alias: str) -> None:
    """Forget an alias; the model stays."""
    _change(lambda kept: kept.setdefault("aliases", {}).pop(alias, None))


def downloaded() -> dict[str, str]:
    """Hub ids that were downloaded by us and were not on this disk before -> the day of it."""
    return _strings(_read().get("downloaded"))


def note_downloaded(repository: str, day: str) -> None:
    """Remember that `repository` is on this disk because of us."""
    _change(lambda kept: kept.setdefault("downloaded", {}).update({repository: day}))


def forget_downloaded(repository: str) -> None:
    """It is no longer on this disk, or no longer ours to remove."""
    _change(lambda kept: kept.setdefault("downloaded", {}).pop(repository, None))


def _read() -> dict[str, Any]:
    try:
        found = json.loads(kept_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _strings(found: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _change(edit: Callable[[dict[str, Any]], object]) -> None:
    """One process at a time reads, edits and replaces the file."""
    file = kept_path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = _read()
            edit(kept)
            fresh = file.with_suffix(".new")
            fresh.write_text(json.dumps(kept, indent=1, sort_keys=True), encoding="utf-8")
            fresh.replace(file)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; MLXPAGED_DATA names another folder") from error
