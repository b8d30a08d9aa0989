"""The API keys a person gives to `serve`. Owns reading and checking them; shows none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from .exits import complain

_SHORTEST = 8


def api_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Keys from flags or MLXPAGED_API_KEY, and those of a file, one a line; blank lines and # comments are passed
    over. ConfigError for a file without keys, or a key that is too short or holds white space."""
    keys = [*given, *(_of_file(file) if file else ())]
    for key in keys:
        if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"an API key must be {_SHORTEST} or more ASCII characters without spaces; "
                "`openssl rand -hex 24` makes one"
            )
    return tuple(dict.fromkeys(keys))


def _of_file(file: Path) -> list[str]:
    try:
        text, mode = file.read_text(encoding="utf-8"), file.stat().st_mode
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read --api-key-file {file}: {error}") from error
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {file} holds no key; write one a line")
    if mode & 0o077:
        complain(f"{file} can be read by others; chmod 600 {file}")
    return keys
