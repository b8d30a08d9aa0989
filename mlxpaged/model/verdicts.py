"""What was found out about a model on this device, kept between starts. Owns the files under cache_dir()/checks; a file
that cannot be read is as good as none, and a folder that cannot be written costs a second at the next start."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import __version__
from ..paths import cache_dir


def remembered(kind: str, model: nn.Module, config: dict[str, Any], find: Callable[[], float | None]) -> float | None:
    """The error that `find` finds for this model, or found at an earlier start: kept by (`kind`, the model's config and
    shapes, versions, device). None means that finding out was given up, and is not kept."""
    record = cache_dir() / "checks" / f"{kind}-{_fingerprint(model, config)}.json"
    error = _read(record)
    if error is None:
        error = find()
        if error is not None:
            _write(record, error)
    return error


def _fingerprint(model: nn.Module, config: dict[str, Any]) -> str:
    device = f"{mx.default_device()} {mx.device_info().get('device_name', '')}"
    # Without names: those of a model that was served differ from those of one just loaded (seam.GatherNorm).
    shapes = sorted((list(array.shape), str(array.dtype)) for _, array in tree_flatten(model.parameters()))
    key = [config, shapes, version("mlx"), version("mlx-lm"), __version__, device]
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _read(record: Path) -> float | None:
    try:
        return float(json.loads(record.read_text())["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(record: Path, error: float) -> None:
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        partial = record.with_suffix(".part")
        partial.write_text(json.dumps({"error": error}))
        partial.replace(record)
