"""The launchers that kernel tests run on."""

from __future__ import annotations

import pytest

from mlxpaged.kernels.launch import Launcher
from tests.emulator import EmulatorLauncher, require_tools


@pytest.fixture(scope="session")
def launch() -> Launcher:
    """The emulator: the Metal text, on the CPU."""
    require_tools()
    return EmulatorLauncher()
