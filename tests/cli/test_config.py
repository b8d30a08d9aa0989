"""config.toml: flag over environment over file over default; changed line by line; completions."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mlxpaged.cli.settings import set_setting, settings
from tests.cli.conftest import ROOT, Program


@pytest.fixture
def file(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXPAGED_CONFIG", environment["MLXPAGED_CONFIG"])
    return Path(environment["MLXPAGED_CONFIG"]) / "config.toml"


def asked(program: Program, *flags: str, **variables: str) -> str:
    return program("run", "scripted", "values", *flags, **variables).out.split()[0]


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(program: Program, file: Path) -> None:
    assert asked(program) == "temperature=0.0"
    assert program("config", "set", "temperature", "0.5").code == 0
    assert asked(program) == "temperature=0.5"
    assert program("config", "set", "run.temperature", "0.6").code == 0
    assert asked(program) == "temperature=0.6"
    assert program("chat", "scripted", stdin="values\n").out.startswith("temperature=0.5")
    assert asked(program, MLXPAGED_TEMPERATURE="0.7") == "temperature=0.7"
    assert asked(program, "--temperature", "0.8", MLXPAGED_TEMPERATURE="0.7") == "temperature=0.8"
    assert program("config", "set", "run.temperature", "--unset").code == 0
    assert asked(program) == "temperature=0.5"


def test_get_set_and_path(program: Program, file: Path) -> None:
    assert program("config", "path").out == f"{file}\n"
    program("config", "set", "port", "9000")
    program("config", "set", "chat.system", 'be "kind"')
    program("config", "set", "model-folders", '["~/a", "/b"]')
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert program("config", "get", "port").out == "9000\n"
    assert program("config", "get", "chat.system").out == 'be "kind"\n'
    assert json.loads(program("config", "get", "--json").out) == {
        "port": 9000,
        "model_folders": ["~/a", "/b"],
        "chat": {"system": 'be "kind"'},
    }
    assert 'chat.system = "be \\"kind\\""' in program("config", "get").out
    unset = program("config", "get", "temperature")
    assert (unset.code, unset.err[:36]) == (2, "mlxpaged: temperature is not set; `m")


def test_every_other_line_stays_as_it_is(file: Path) -> None:
    before = "# mine\nport = 1  # old\n\n[chat]\n# warm\ntemperature = 0.9\n\n[serve]\nport = 3\n"
    file.parent.mkdir()
    file.write_text(before)
    set_setting("port", "2")
    set_setting("chat.top_p", "0.5")
    set_setting("serve.port", None)
    set_setting("run.seed", "7")
    assert file.read_text() == (
        "# mine\nport = 2\n\n[chat]\n# warm\ntemperature = 0.9\ntop_p = 0.5\n\n[serve]\n\n[run]\nseed = 7\n"
    )


@pytest.mark.parametrize(
    "text", ["word", "two words", 'a "quote"', "back\\slash", "C:\\new", "0.5", "true", "[1, 2]", ""]
)
def test_any_text_comes_back(file: Path, text: str) -> None:
    set_setting("model", text)
    expected = {"0.5": 0.5, "true": True, "[1, 2]": [1, 2]}.get(text, text)
    assert settings() == {"model": expected} == tomllib.loads(file.read_text())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("set", "temprature", "1"), "there is no setting temprature; did you mean temperature?"),
        (("set", "play.temperature", "1"), "'play' is no command with settings"),
        (("set", "temperature"), "give a value"),
    ],
)
def test_wrong_use_is_one_line(program: Program, args: tuple[str, ...], words: str) -> None:
    ended = program("config", *args)
    assert ended.code == 2 and words in ended.err and ended.err.count("\n") == 1


def test_a_broken_file_is_named_and_a_wrong_value_too(program: Program, file: Path) -> None:
    file.parent.mkdir()
    file.write_text("port = = 1")
    broken = program("version")
    assert broken.code == 2 and f"{file} cannot be read" in broken.err and "line 1" in broken.err
    file.write_text('temperature = "warm"')
    wrong = program("run", "scripted", "x")
    assert wrong.code == 2 and "--temperature" in wrong.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_for_a_shell(program: Program, shell: str) -> None:
    script = program("completions", shell).out
    assert "_MLXPAGED_COMPLETE" in script and "mlxpaged" in script


def test_what_comes_next_is_completed(environment: dict[str, str]) -> None:
    asking = {"_MLXPAGED_COMPLETE": "complete_bash", "COMP_WORDS": "mlxpaged se", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mlxpaged"],
        env=environment | asking,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.stdout.split() == ["serve", "sessions"]
    assert (
        "no completions for 'tcsh'"
        in subprocess.run(
            [sys.executable, "-m", "mlxpaged", "completions", "tcsh"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        ).stderr
    )
