"""The one import of mlx-lm. Owns keeping it quiet and harmless; nothing here is called before a model is loaded.

Importing mlx-lm imports transformers (a second), prints notices, and lowers the process's limit of open files, which
a server with many clients needs.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import resource
import warnings
from collections.abc import Iterator
from types import ModuleType

_QUIET = {
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def quiet_environment() -> None:
    """Ask the Hugging Face libraries for silence; what a person set stays."""
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)


def import_mlx_lm(name: str = "mlx_lm.utils") -> ModuleType:
    """Import a module of mlx-lm without notices and without its change to RLIMIT_NOFILE; idempotent."""
    quiet_environment()
    with _open_files_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(name)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return module


@contextlib.contextmanager
def _open_files_kept() -> Iterator[None]:
    """A lowered hard limit cannot be raised again without privileges, so the call itself must not happen."""
    original = resource.setrlimit

    def skip_open_files(kind: int, limits: tuple[int, int]) -> None:
        if kind != resource.RLIMIT_NOFILE:
            original(kind, limits)

    resource.setrlimit = skip_open_files
    try:
        yield
    finally:
        resource.setrlimit = original
