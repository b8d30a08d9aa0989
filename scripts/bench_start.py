"""How long until a person can do something: ratios of start-up times, each the best of several runs.

    scripts/bench_start.py [RUNS]

`--help` against a bare `import typer` (goal: at most 2.2), and the prompt of `mlxpaged chat` against that plus the
imports a line editor needs (goal: at most 2). CPU seconds of the process, and for the prompt wall seconds: nothing but
the interpreter works before it is there. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time

import pexpect

BARE = "import typer"
EDITOR = "import typer, prompt_toolkit, prompt_toolkit.shortcuts, asyncio, sqlite3, numpy"


def cpu_seconds(arguments: list[str]) -> float:
    """CPU time of one Python process, its start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def wall_seconds(arguments: list[str]) -> float:
    """Time until one Python process has ended."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def seconds_to_prompt(environment: dict[str, str]) -> float:
    """Time until `mlxpaged chat` shows its prompt; it is ended before a server has been started."""
    started = time.perf_counter()
    chat = pexpect.spawn(sys.executable, ["-m", "mlxpaged", "chat", "smollm2"], env=environment, timeout=60)
    chat.expect_exact(">>>")
    taken = time.perf_counter() - started
    chat.kill(9)
    chat.close()
    return taken


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory() as home:
        folders = {f"MLXPAGED_{name}": home for name in ("STATE", "DATA", "CONFIG", "CACHE")}
        environment = os.environ | folders | {"TERM": "xterm-256color"}
        typer = min(cpu_seconds(["-c", BARE]) for _ in range(runs))
        shown_help = min(cpu_seconds(["-m", "mlxpaged", "--help"]) for _ in range(runs))
        editor = min(wall_seconds(["-c", EDITOR]) for _ in range(runs))
        prompt = min(seconds_to_prompt(environment) for _ in range(runs))
    print(
        json.dumps(
            {
                "import_typer_s": round(typer, 3),
                "help_s": round(shown_help, 3),
                "help_ratio": round(shown_help / typer, 2),
                "import_editor_s": round(editor, 3),
                "prompt_s": round(prompt, 3),
                "prompt_ratio": round(prompt / editor, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
