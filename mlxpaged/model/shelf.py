"""Every model on this disk, wherever another program put it. Owns where to look; copies, changes and loads nothing, and
imports no mlx."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .installed import installed_models
from .kept import aliases, downloaded
from .smollm2 import smollm2_path
from .sources import resolve

_DEPTH = 4
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class OnDisk:
    """One model. `name` is what to type; `source` is who put it there; `ours`: `mlxpaged rm` may remove it."""

    name: str
    source: str
    path: Path
    kind: Literal["folder", "gguf"]
    num_bytes: int
    ours: bool = False


def models_on_disk(folders: Iterable[Path] = (), home: Path | None = None) -> list[OnDisk]:
    """smollm2 and the hub's cache first, then LM Studio's folders and loose .gguf files of the usual places and of
    `folders`, then files and folders elsewhere that have an alias. A file that is reached twice is listed once."""
    found = [*_fetched(), *_hub_ggufs()]
    for source, place in _places(home or Path.home(), folders):
        found += _in_folder(place, source)
    found += _named()
    seen: set[Path] = set()
    return [one for one in found if not (one.path.resolve() in seen or seen.add(one.path.resolve()))]  # type: ignore[func-returns-value]


def weights_bytes(path: Path) -> int:
    """Bytes of a model's weights: of a .gguf file, or of a folder's safetensors."""
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files if file.exists())


def _fetched() -> Iterator[OnDisk]:
    ours = downloaded()
    for name in installed_models():
        if name == "smollm2":
            yield OnDisk(name, "mlxpaged", smollm2_path(), "gguf", weights_bytes(smollm2_path()), ours=True)
            continue
        path = resolve(name, fetch=False).path
        yield OnDisk(
            name, "mlxpaged" if name in ours else "hub cache", path, "folder", weights_bytes(path), name in ours
        )


def _hub_ggufs() -> Iterator[OnDisk]:
    from huggingface_hub.constants import HF_HUB_CACHE

    for snapshot in sorted(Path(HF_HUB_CACHE).glob("models--*/snapshots/*")):
        yield from _ggufs(snapshot, "hub cache")


def _named() -> Iterator[OnDisk]:
    for model in dict.fromkeys(aliases().values()):
        path = Path(model)
        if path.is_absolute() and path.exists():
            yield OnDisk(model, "alias", path, "folder" if path.is_dir() else "gguf", weights_bytes(path))


def _places(home: Path, folders: Iterable[Path]) -> list[tuple[str, Path]]:
    """(source, folder): the usual ones that exist, then a person's own."""
    lm_studio = [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]
    llama_cpp = [home / "Library" / "Caches" / "llama.cpp", home / ".cache" / "llama.cpp"]
    if cache := os.environ.get("LLAMA_CACHE"):
        llama_cpp.insert(0, Path(cache))
    loose = [home / "models", *([home / "Models"] if sys.platform != "darwin" else [])]
    named = [
        *(("LM Studio", place) for place in lm_studio),
        *(("llama.cpp", place) for place in llama_cpp),
        *(("folder", place) for place in (*loose, *folders)),
    ]
    return [(source, place) for source, place in named if place.is_dir()]


def _in_folder(place: Path, source: str) -> Iterator[OnDisk]:
    for folder, inner, files in os.walk(place):
        here = Path(folder)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        if len(here.relative_to(place).parts) >= _DEPTH:
            inner.clear()
        if "config.json" in files and any(name.endswith(".safetensors") for name in files):
            yield OnDisk(str(here), source, here, "folder", weights_bytes(here))
            inner.clear()
        yield from _ggufs(here, source)


def _ggufs(folder: Path, source: str) -> Iterator[OnDisk]:
    """Whole model files of one folder: no parts of a split one, no picture projectors."""
    for file in sorted(folder.glob("*.gguf")):
        if not _PART.search(file.name) and not file.name.startswith("mmproj") and file.is_file():
            yield OnDisk(str(file), source, file, "gguf", file.stat().st_size)
