"""Where files live. Owns every folder of ours outside the package; creates none at import."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

_APP = "mlxpaged"


def cache_dir() -> Path:
    """What can be fetched or computed again: the embedded model, probe results. MLXPAGED_CACHE overrides."""
    return _override("MLXPAGED_CACHE") or platformdirs.user_cache_path(_APP)


def data_dir() -> Path:
    """What a person would miss: sessions. MLXPAGED_DATA overrides."""
    return _override("MLXPAGED_DATA") or platformdirs.user_data_path(_APP)


def state_dir() -> Path:
    """What is true while something runs or was last used: history of the prompt. MLXPAGED_STATE overrides."""
    return _override("MLXPAGED_STATE") or platformdirs.user_state_path(_APP)


def config_dir() -> Path:
    """What a person wrote: config.toml. MLXPAGED_CONFIG overrides."""
    return _override("MLXPAGED_CONFIG") or platformdirs.user_config_path(_APP)


def _override(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value).expanduser() if value else None
