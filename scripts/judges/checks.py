"""What all judges share: a list of named checks, each run by itself, and a line for each. Uses the standard library
only: every judge runs in an environment of its own client."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}

_checks: list[tuple[str, Callable[[], object]]] = []


def check(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Registers a function as one check; it fails by raising."""

    def register(function: Callable[[], object]) -> Callable[[], object]:
        _checks.append((name, function))
        return function

    return register


def run(package: str) -> None:
    """Runs every check and exits 1 when one failed."""
    failed = 0
    label = f"{package} {version(package)}"
    for name, function in _checks:
        try:
            function()
        except Exception:
            failed += 1
            print(f"FAIL  {label}: {name}", flush=True)
            traceback.print_exc()
        else:
            print(f"pass  {label}: {name}", flush=True)
    sys.exit(int(failed > 0))
