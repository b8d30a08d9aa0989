"""What was found out about a model on this device, kept between starts. Owns the files under cache_dir()/checks; a file
that cannot be read is as good as none, and a folder that cannot be written costs a second at the next start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import __version__
from ..kernels.records import read_json, write_json
from ..paths import cache_dir


def remembered(kind: str, model: nn.Module, config: dict[str, Any], find: Callable[[], float | None]) -> float | None:
    """The error that `find` finds for this model, or found at an earlier start: kept by (`kind`, the model's config and
    shapes, versions, device). None means that finding out was given up, and is not kept."""
    record = cache_dir() / "checks" / f"{kind}-{_fingerprint(model, config)}.json"
    error = read_json(record, _error)
    if error is None:
        error = find()
        if error is not None:
            write_json(record, {"error": float(error)})
    return error


def _fingerprint(model: nn.Module, config: dict[str, Any]) -> str:
    device = f"{mx.default_device()} {mx.device_info().get('device_name', '')}"
    # Without names: those of a model that was served differ from those of one just loaded (seam.GatherNorm).
    shapes = sorted((list(array.shape), str(array.dtype)) for _, array in tree_flatten(model.parameters()))
    key = [config, shapes, version("mlx"), version("mlx-lm"), __version__, device]
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _error(record: Any) -> float:
    """The error that a record holds; ValueError where it is none."""
    error = record["error"]
    if type(error) is not float or error < 0:  # NaN is one: whoever reads it must not take it for agreement
        raise ValueError(f"{error!r} is no error")
    return error
