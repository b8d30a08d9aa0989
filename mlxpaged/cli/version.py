"""`mlxpaged version`: what is installed, without importing any of it."""

from __future__ import annotations

import json
import platform
import sys
from typing import Annotated

import typer

from .. import __version__

_PARTS = ("mlx", "mlx-lm", "mlx-metal", "mlx-cpu", "mlx-cuda-13", "mlx-cuda-12")


def version(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Say which mlxpaged, mlx and Python this is."""
    found = {"mlxpaged": __version__, "python": platform.python_version(), "system": _system(), **_installed()}
    if as_json:
        print(json.dumps(found))
    else:
        print(f"mlxpaged {__version__}")
        rest = [f"{name} {value}" for name, value in found.items() if name not in {"mlxpaged", "system"}]
        print(f"{', '.join(rest)} on {found['system']}")


def on_a_gpu() -> bool:
    """Whether the installed MLX build is one for a GPU."""
    return any(name.startswith(("mlx-metal", "mlx-cuda")) for name in _installed())


def _installed() -> dict[str, str]:
    import importlib.metadata

    versions = {}
    for part in _PARTS:
        try:
            versions[part] = importlib.metadata.version(part)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _system() -> str:
    return f"{'macOS' if sys.platform == 'darwin' else platform.system()} {platform.machine()}"
