"""Fixtures for every test: the system's BLAS before mlx, no way out of the test folder, the real small model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mlxpaged.model.blas import open_system_blas

if TYPE_CHECKING:
    from mlxpaged.model.loader import LoadedModel
    from mlxpaged.model.sources import ModelSource

open_system_blas()  # it must come before any test module imports mlx.core


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`@pytest.mark.needs_tool("tmux")`: skipped by name where the program is missing, a failure under CI=true."""
    for mark in item.iter_markers("needs_tool"):
        if missing := [tool for tool in mark.args if shutil.which(tool) is None]:
            reason = f"needs {', '.join(missing)} (apt-get install {' '.join(missing)})"
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


_DRIVES_PROCESSES = ("cli", "tui", "chat/test_attach.py", "server/test_handshake.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that drive other processes and terminals wait for them on a machine that may be busy: one that fails is
    run once more, and the report says so."""
    here = Path(__file__).parent
    for item in items:
        if str(item.path.relative_to(here).as_posix()).startswith(_DRIVES_PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session", autouse=True)
def folders_of_no_person(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or writes what a person keeps: sessions, aliases, settings, running servers."""
    for name in ("DATA", "STATE", "CONFIG"):
        os.environ.setdefault(f"MLXPAGED_{name}", str(tmp_path_factory.mktemp(name.lower())))


@pytest.fixture(scope="session")
def smollm2_source() -> ModelSource:
    """The embedded default on disk, as scripts/test fetched it; skipped where it is missing, failed under CI."""
    from mlxpaged.model.smollm2 import smollm2_path
    from mlxpaged.model.sources import ModelSource

    path: Path = smollm2_path()
    if not path.is_file():
        missing = f"{path} is missing: scripts/test fetches it, or `mlxpaged run smollm2 Hello`"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    return ModelSource("smollm2", path, "gguf")


@pytest.fixture(scope="session")
def smollm2(smollm2_source: ModelSource) -> LoadedModel:
    """SmolLM2-135M-Instruct in float32. Session scoped: tests read it and never change its weights."""
    from mlxpaged.model.loader import load

    return load(smollm2_source, dtype="float32")
