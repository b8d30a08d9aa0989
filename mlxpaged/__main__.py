"""`python -m mlxpaged` and the `mlxpaged` program."""

from __future__ import annotations

import sys

from .cli.app import run_command_line
from .cli.exits import leave


def main() -> None:
    """Runs the command line on this process's arguments and exits with its code."""
    leave(run_command_line(sys.argv[1:]))


if __name__ == "__main__":
    main()
