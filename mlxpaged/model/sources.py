"""From a name a person types to files on disk. Owns which names mean what; imports no mlx and reads no weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import ModelNotFound, UnsupportedModel
from .kept import aliases

HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_ACCEPTED = "a Hugging Face id such as org/name, a folder of an MLX model, a .gguf file, or smollm2"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a fetch is: `label` says what is fetched; `total_bytes` is None while unknown."""

    label: str
    done_bytes: int
    total_bytes: int | None


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk. `path` is a folder with config.json and safetensors, or one .gguf file."""

    name: str
    path: Path
    kind: Literal["folder", "gguf"]


def resolve(name: str, on_progress: OnProgress | None = None, fetch: bool = True) -> ModelSource:
    """Find what `name` means and fetch it where it is not on disk yet; without `fetch` that is ModelNotFound.

    The alias first, then a path that exists, then a hub id (`org/name` or `org/name@revision`).
    Raises ModelNotFound, UnsupportedModel, ConfigError (a folder cannot be written) or Unreachable (no network).
    """
    name = name.strip()
    name = aliases().get(name, name)
    if name == "smollm2":
        from .smollm2 import fetch_smollm2, smollm2_path

        if not fetch and not smollm2_path().is_file():
            raise ModelNotFound("smollm2 is not on this disk; `mlxpaged run smollm2 Hello` fetches it")
        return ModelSource("smollm2", fetch_smollm2(on_progress), "gguf")
    path = Path(name).expanduser()
    if name and path.exists():
        return _local(path)
    hub = HUB_ID.fullmatch(name)
    if hub is None or name.endswith(".gguf") or name.startswith((".", "~")):
        raise ModelNotFound(f"no model at {name!r}; give {_ACCEPTED}")
    from .hub import snapshot

    return ModelSource(name, snapshot(hub["repo"], hub["revision"], on_progress, fetch), "folder")


def _local(path: Path) -> ModelSource:
    if path.is_dir():
        return _folder(path)
    if path.suffix.lower() == ".gguf":
        return ModelSource(path.stem, path, "gguf")
    raise UnsupportedModel(f"{path} is not a .gguf file; for safetensors give the folder that holds config.json")


def _folder(path: Path) -> ModelSource:
    name = path.resolve().name
    if (path / "config.json").is_file():
        return ModelSource(name, path, "folder")
    ggufs = sorted(entry for entry in path.iterdir() if entry.suffix.lower() == ".gguf")
    if len(ggufs) == 1:
        return ModelSource(ggufs[0].stem, ggufs[0], "gguf")
    if ggufs:
        raise ModelNotFound(f"{path} holds {len(ggufs)} .gguf files; give one of them, such as {ggufs[0]}")
    raise ModelNotFound(f"{path} holds no config.json and no .gguf file; give {_ACCEPTED}")
