"""Fetching a model on purpose, and removing it again. Owns the check of the disk before and of the bytes after; the
transfer itself, which resumes, is hub's and smollm2's."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ..errors import ConfigError, ModelNotFound
from . import hub, smollm2
from .kept import downloaded, forget_downloaded
from .shelf import weights_bytes
from .sources import HUB_ID, OnProgress, Progress, resolve

_SPARE = 1 << 30
"""Bytes that stay free on the disk: a full one breaks more than a download."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model that is whole on this disk. `num_checked` of its files were hashed against what the hub promised."""

    name: str
    path: Path
    num_bytes: int
    num_checked: int


def pull(name: str, on_progress: OnProgress | None = None) -> Pulled:
    """Fetch `name` where it is not on disk, and check every large file's SHA-256, old or new.

    Raises ConfigError (too little room, with the numbers), ModelNotFound, UnsupportedModel, Unreachable. A file whose
    hash is wrong is removed, so that the next pull fetches it again.
    """
    report = on_progress or (lambda progress: None)
    found = HUB_ID.fullmatch(name) if not Path(name).expanduser().exists() else None
    if found:
        _require_room(found["repo"], found["revision"])
    source = resolve(name, report)
    checked = _check_smollm2(source.path, report) if name == "smollm2" else _check_folder(name, source.path, report)
    return Pulled(name, source.path, weights_bytes(source.path), checked)


def remove(name: str) -> int:
    """Delete a model that we downloaded; the bytes that are free again. Raises ConfigError for one that is not ours,
    ModelNotFound for one that is not there."""
    if name == "smollm2":
        path = smollm2.smollm2_path()
        if not path.is_file():
            raise ModelNotFound("smollm2 is not on this disk")
        freed = path.stat().st_size
        path.unlink()
        return freed
    if name in downloaded():
        freed = _remove_repository(name)
        forget_downloaded(name)
        return freed
    if Path(name).expanduser().exists():
        raise ConfigError(f"{name} was not downloaded by mlxpaged, so it is not removed; delete the file yourself")
    if resolve(name, fetch=False):
        raise ConfigError(f"another program put {name} into the hub's cache; `hf cache rm model/{name}` removes it")
    return 0


def _remove_repository(name: str) -> int:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.constants import HF_HUB_CACHE

    if not Path(HF_HUB_CACHE).is_dir():
        return 0
    cache = scan_cache_dir()
    hashes = [
        revision.commit_hash
        for repository in cache.repos
        if repository.repo_type == "model" and repository.repo_id == name
        for revision in repository.revisions
    ]
    if not hashes:
        return 0
    plan = cache.delete_revisions(*hashes)
    plan.execute()
    return int(plan.expected_freed_size)


def _require_room(repository: str, revision: str | None) -> None:
    """Raises ConfigError when what is missing does not fit on the disk; silent where the hub cannot be asked, which the
    fetch itself will say."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        about = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=10)
    except Exception:  # told by the fetch, in one place
        return
    blobs = Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "blobs"
    needed = 0
    for file in about.siblings or ():
        if any(fnmatch(file.rfilename, pattern) for pattern in hub.PATTERNS):
            etag = file.lfs.sha256 if file.lfs else file.blob_id
            partial = blobs / f"{etag}.incomplete"
            have = (file.size or 0) if (blobs / str(etag)).exists() else _size(partial)
            needed += max(0, (file.size or 0) - have)
    free = shutil.disk_usage(_existing(Path(HF_HUB_CACHE))).free
    if needed and needed + _SPARE > free:
        raise ConfigError(
            f"{repository} needs {needed / 1e9:.1f} GB more and {_SPARE / 1e9:.0f} GB to spare, but the disk of "
            f"{HF_HUB_CACHE} has {free / 1e9:.1f} GB free; free some, or set HF_HOME to another disk"
        )


def _check_folder(name: str, folder: Path, report: OnProgress) -> int:
    """Hashes the files whose name in the hub's cache is their SHA-256; a loose folder has none."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_symlink() and _SHA256.fullmatch(file.resolve().name)]
    total = sum(file.stat().st_size for file in files)
    done = 0
    for file in files:
        blob = file.resolve()

        def count(size: int) -> None:
            nonlocal done
            done += size
            report(Progress(f"checking {name}", done, total))

        if _sha256(blob, count) != blob.name:
            file.unlink()
            blob.unlink()
            raise ModelNotFound(f"{name}: {file.name} arrived damaged and was removed; pull it again")
    return len(files)


def _check_smollm2(path: Path, report: OnProgress) -> int:
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        report(Progress("checking smollm2", done, smollm2.SIZE))

    if _sha256(path, count) != smollm2.SHA256:
        path.unlink()
        raise ModelNotFound("smollm2 was damaged on this disk and was removed; pull it again")
    return 1


def _sha256(path: Path, count: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            count(len(piece))
    return digest.hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
