"""Flags become configurations; the tree of commands stays light."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mlxpaged.cli.app import app
from mlxpaged.cli.options import byte_count, engine_config, sampling_values
from mlxpaged.errors import ConfigError
from tests.cli.conftest import ROOT, Program

ONE_TIME = {"--help", "--json", "--raw", "--continue"}
HEAVY = (
    "asyncio",
    "platformdirs",
    "rich",
    "sqlite3",
    "mlx",
    "mlx_lm",
    "transformers",
    "textual",
    "starlette",
    "uvicorn",
    "numpy",
    "prompt_toolkit",
    "httpx",
)


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from mlxpaged.cli.app import run_command_line
for arguments in (["--help"], ["run", "--help"], ["chat", "--help"], ["serve", "--help"],
                  ["sessions", "--help"], ["pull", "--help"], ["version"]):
    assert run_command_line(arguments) == 0
print(sorted(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, timeout=60
    )
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("command", ["run", "chat", "serve", "version", "bench"])
def test_every_command_explains_itself(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert f"Usage: root {command}" in shown.output or f"{command} " in shown.output


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_every_option_has_its_environment_variable(command: str) -> None:
    text = " ".join(CliRunner().invoke(app, [command, "--help"]).output.split())
    options = [word for word in text.split() if word.startswith("--") and word not in ONE_TIME]
    for option in options:
        variable = "MLXPAGED_" + option.split("/")[0].strip("-,").replace("-", "_").upper()
        assert option.startswith("--no-") or variable in text


def test_no_command_gives_the_short_help(program: Program) -> None:
    ended = program()
    assert ended.code == 0
    assert "Usage: mlxpaged" in ended.out and "mlxpaged chat" in ended.out


def test_version_says_what_is_installed(program: Program) -> None:
    found = json.loads(program("version", "--json").out)
    assert {"mlxpaged", "mlx", "mlx-lm", "python", "system"} <= set(found)
    assert program("version").out.startswith(f"mlxpaged {found['mlxpaged']}\n")
    assert program("--version").out == program("version").out


@pytest.mark.parametrize(
    ("text", "count"), [("512", 512), ("1k", 1024), ("6GB", 6 * 2**30), ("1.5 GiB", 3 * 2**29), ("2mb", 2**21)]
)
def test_sizes(text: str, count: int) -> None:
    assert byte_count("--memory-budget", text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "6 gigs"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--memory-budget is .* like 6GB"):
        byte_count("--memory-budget", text)


def test_what_is_asked_for_goes_over_the_models_own_values() -> None:
    defaults = {"temperature": 0.6, "top_k": 20.0, "unknown": 1.0}
    assert sampling_values({"temperature": 0.0}, defaults) == {"temperature": 0.0, "top_k": 20}


def test_an_engine_config_from_flags() -> None:
    config = engine_config("float16", 4096, "1GB", 64, max_rows=4)
    assert (config.dtype, config.context_len, config.memory_budget, config.step_budget, config.max_rows) == (
        "float16",
        4096,
        2**30,
        64,
        4,
    )


def test_attention_is_one_of_three_words() -> None:
    assert [engine_config("auto", None, attention=word).attention for word in ("auto", "kernel", "plain")] == [
        "auto",
        "kernel",
        "plain",
    ]
    with pytest.raises(ConfigError, match="--attention is 'metal'; it must be one of auto, kernel, plain"):
        engine_config("auto", None, attention="metal")
