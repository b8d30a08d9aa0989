"""What must happen before mlx is imported can happen: the service's module does not import it, its thread does."""

from __future__ import annotations

import resource
import subprocess
import sys

SERVICE = """
import resource, sys
from mlxpaged.config import EngineConfig
from mlxpaged.engine.service import EngineService
from mlxpaged.errors import MlxpagedError
print("mlx.core" in sys.modules, "mlx_lm" in sys.modules)
service = EngineService(EngineConfig())
try:
    service.load("./nothing")
except MlxpagedError:
    pass
service.close()
print("mlx.core" in sys.modules, resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_service_imports_mlx_only_when_it_loads_and_keeps_the_limit_of_open_files() -> None:
    done = subprocess.run([sys.executable, "-c", SERVICE], capture_output=True, text=True, timeout=120)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert done.stdout.splitlines() == ["False False", f"True {limit}"]
    assert done.stderr == ""
