"""Where files live. Owns every folder of ours outside the package; creates none at import."""

from __future__ import annotations

import os
from pathlib import Path

_APP = "mlxpaged"


def cache_dir() -> Path:
    """What can be fetched or computed again: the embedded model, probe results. MLXPAGED_CACHE overrides."""
    return _folder("MLXPAGED_CACHE", "user_cache_path")


def data_dir() -> Path:
    """What a person would miss: sessions. MLXPAGED_DATA overrides."""
    return _folder("MLXPAGED_DATA", "user_data_path")


def state_dir() -> Path:
    """What is true while something runs or was last used: history of the prompt. MLXPAGED_STATE overrides."""
    return _folder("MLXPAGED_STATE", "user_state_path")


def config_dir() -> Path:
    """What a person wrote: config.toml. MLXPAGED_CONFIG overrides."""
    return _folder("MLXPAGED_CONFIG", "user_config_path")


def _folder(variable: str, kind: str) -> Path:
    """The folder that `variable` names, else the platform's own of this kind."""
    if value := os.environ.get(variable):
        return Path(value).expanduser()
    import platformdirs  # only where it is needed: `--help` is not the place to wait for it

    return Path(getattr(platformdirs, kind)(_APP))
