"""Which models are on this disk by name. Owns looking into the hub's cache; reads no weights and imports no mlx."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .hub import is_whole
from .kept import aliases
from .smollm2 import smollm2_path

_TOKENIZERS = ("tokenizer.json", "tokenizer.model")


def installed_models(hub: Path | None = None) -> list[str]:
    """smollm2 where its file is, then the hub ids whose newest revision is whole in the cache folder `hub` (None: the
    usual one), by name."""
    names = ["smollm2"] if smollm2_path().is_file() else []
    folder = hub or _hub_folder()
    repositories = sorted(folder.glob("models--*--*")) if folder.is_dir() else []
    return names + [_hub_id(entry) for entry in repositories if any(map(_is_usable, _snapshots(entry)))]


def known_models(listed: Sequence[str], hub: Path | None = None) -> list[str]:
    """`listed` first (names, folders and files that a person gave), then what is installed, then names that a person
    gave to models."""
    return list(dict.fromkeys([*listed, *installed_models(hub), *aliases()]))


def _hub_folder() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _hub_id(repository: Path) -> str:
    return repository.name.removeprefix("models--").replace("--", "/", 1)


def _snapshots(repository: Path) -> list[Path]:
    """The folder of the main revision, or all of them where no name points to one."""
    try:
        revision = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return sorted((repository / "snapshots").glob("*"))
    return [repository / "snapshots" / revision]


def _is_usable(snapshot: Path) -> bool:
    return is_whole(snapshot) and any((snapshot / name).is_file() for name in _TOKENIZERS)
