"""Models of the Hugging Face Hub on this disk. Owns asking huggingface_hub, which resumes and verifies, and saying in
one line why it could not; what is whole on disk is never asked for again."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigError, MlxpagedError, ModelNotFound, Unreachable, UnsupportedModel
from .kept import note_downloaded
from .sources import OnProgress, Progress
from .upstream import quiet_environment

PATTERNS = ["*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]


def snapshot(repo: str, revision: str | None, on_progress: OnProgress | None = None, fetch: bool = True) -> Path:
    """The folder of a repository's files, fetched where it is not whole on disk; without `fetch` that is ModelNotFound.

    Raises ModelNotFound (missing, gated, no such revision), UnsupportedModel (no safetensors), Unreachable (no
    network) or ConfigError (the disk is full).
    """
    quiet_environment()
    import huggingface_hub as hub
    from huggingface_hub.constants import HF_HUB_CACHE

    options: dict[str, Any] = {"revision": revision, "allow_patterns": PATTERNS}
    bar = _progress_bar(repo, on_progress or (lambda progress: None))
    try:
        found = Path(hub.snapshot_download(repo, local_files_only=True, **options))
        if is_whole(found):
            return found
    except Exception:  # not on disk, or not all of it: ask the network, which says what is wrong
        pass
    if not fetch:
        raise ModelNotFound(f"{repo} is not whole on this disk; `mlxpaged pull {repo}` fetches it")
    if not (Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "snapshots").exists():
        bar = _progress_bar(repo, _noting(repo, on_progress or (lambda progress: None)))
    try:
        fetched = Path(hub.snapshot_download(repo, tqdm_class=bar, **options))
    except Exception as error:  # many kinds over its versions; told apart by name and status
        raise _explain(repo, revision, error) from error
    if not is_whole(fetched):
        raise UnsupportedModel(
            f"{repo} holds no config.json with safetensors; for a GGUF repository download one file and give its path"
        )
    return fetched


def _noting(repo: str, on_progress: OnProgress) -> OnProgress:
    """Nothing of it was here before: with its first bytes it is ours, and `mlxpaged rm` may remove it."""
    noted = False

    def report(progress: Progress) -> None:
        nonlocal noted
        if not noted:
            noted = True
            with suppress(ConfigError):  # a data folder that cannot be written is no reason not to fetch
                note_downloaded(repo, time.strftime("%Y-%m-%d"))
        on_progress(progress)

    return report


def is_whole(folder: Path) -> bool:
    """Whether the config and every weight file its index names are there."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return False
        return all((folder / name).is_file() for name in names)
    return any(folder.glob("model*.safetensors"))


def _explain(repo: str, revision: str | None, error: Exception) -> MlxpagedError:
    names = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "GatedRepoError" in names or status == 403:
        return ModelNotFound(
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then `hf auth login` or set HF_TOKEN"
        )
    if "RevisionNotFoundError" in names:
        return ModelNotFound(f"{repo} has no revision {revision!r}; leave out @{revision} for the newest")
    if "RepositoryNotFoundError" in names or status in (401, 404):
        return ModelNotFound(f"no model {repo} on the Hugging Face Hub (or it is private: set HF_TOKEN)")
    if "HFValidationError" in names:
        return ModelNotFound(f"{repo!r} is no Hugging Face id; it looks like mlx-community/Qwen3-4B-4bit")
    if "OfflineModeIsEnabled" in names:
        return Unreachable(f"{repo} is not on this disk and HF_HUB_OFFLINE is set; unset it to fetch the model")
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return ConfigError(f"cannot store {repo}: {error.strerror}; HF_HOME names another folder")
    return Unreachable(
        f"cannot fetch {repo}: the Hugging Face Hub does not answer; what was fetched is kept, try again to resume"
    )


def _progress_bar(label: str, on_progress: OnProgress) -> type:
    """A tqdm that draws nothing and reports bytes; huggingface_hub moves it from its own threads.

    It keeps one bar for bytes received and one for bytes on disk, which counts what an earlier try left: the larger
    of the two is how far the fetch is.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    most = -1

    class Reporting(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **(options | {"disable": False, "file": _Nowhere()}))

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            drawn = super().update(n)
            if self._counts_bytes and self.n > most:
                most = int(self.n)
                on_progress(Progress(label, most, int(self.total) if self.total else None))
            return drawn

    return Reporting


class _Nowhere:
    """A terminal that forgets."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
