"""config.toml: flag over environment over file over default; changed line by line; completions."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mlxpaged.cli.doctor import settings_file
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


@pytest.fixture
def broken(file: Path) -> Path:
    file.parent.mkdir()
    file.write_text("port = = 1")
    return file


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("run", "--help"),
        ("version",),
        ("ps",),
        ("stop",),
        ("sessions", "list"),
        ("list",),
        ("config", "path"),
        ("completions", "zsh"),
    ],
)
def test_a_broken_file_stops_no_command_that_needs_no_defaults(
    program: Program, broken: Path, args: tuple[str, ...]
) -> None:
    assert program(*args).code == 0


@pytest.mark.parametrize(
    "args",
    [
        ("run", "scripted", "x"),
        ("chat", "scripted"),
        ("tui",),
        ("serve", "scripted"),
        ("bench", "engine"),
        ("load", "scripted"),
        ("pull",),
        ("config", "get"),
        ("config", "set", "port", "9000"),
    ],
)
def test_a_broken_file_is_named_by_a_command_that_needs_it(
    program: Program, broken: Path, args: tuple[str, ...]
) -> None:
    ended = program(*args)
    assert ended.code == 2 and f"{broken} cannot be read" in ended.err and "line 1" in ended.err
    assert ended.err.count("\n") == 1 and broken.read_text() == "port = = 1"


@pytest.mark.parametrize("text", ["port = = 1", 'temperature = "hot"', "chat = 1", 'model_folders = "~/models"'])
def test_doctor_reports_a_wrong_file(file: Path, text: str) -> None:
    assert not settings_file().problem
    file.parent.mkdir()
    file.write_text(text)
    found = settings_file()
    assert found.problem and str(file) in found.value and str(file) in str(found.advice)


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("temperature", "hot", "temperature cannot be 'hot': "),
        ("run.temperature", "5", "--temperature is 5.0; it must be from 0 (greedy) to 2"),
        ("top_k", "0.5", "top_k cannot be 0.5: "),
        ("port", "70000", "65535"),
        ("ctx", "3", "--ctx is 3; it must be at least 16"),
        ("memory_budget", "lots", "like 6GB"),
        ("dtype", "float8", "it must be one of"),
        ("prefix_cache", "perhaps", "prefix_cache cannot be 'perhaps': "),
        ("model_folders", "~/models", "it must be a list"),
    ],
)
def test_a_value_that_no_flag_can_have_is_not_set(
    program: Program, file: Path, key: str, text: str, words: str
) -> None:
    ended = program("config", "set", key, text)
    assert ended.code == 2 and words in ended.err and ended.err.count("\n") == 1
    assert not file.exists()


@pytest.mark.parametrize(
    ("text", "key"), [('temperature = "hot"', "temperature"), ("[run]\ntemperature = 5", "run.temperature")]
)
def test_a_wrong_value_in_the_file_is_blamed_on_the_file(program: Program, file: Path, text: str, key: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    wrong = program("run", "scripted", "x")
    assert wrong.code == 2 and f"{file} has {key} = " in wrong.err and "MLXPAGED_TEMPERATURE" not in wrong.err
    assert program("version").code == 0
    assert program("config", "set", key, "0.5").code == 0
    assert asked(program) == "temperature=0.5"


def test_a_list_and_a_key_of_one_command_can_be_set(program: Program, file: Path) -> None:
    assert program("config", "set", "serve.api_key", '["a-key-of-sixteen"]').code == 0
    assert program("config", "set", "chat.api_key", "a-key-of-sixteen").code == 0
    assert program("config", "set", "api_key", "a-key-of-sixteen").code == 0


def test_a_key_in_the_wrong_form_is_not_told(program: Program, file: Path) -> None:
    refused = program("config", "set", "serve.api_key", "a-key-of-sixteen")
    assert refused.err == "mlxpaged: serve.api_key cannot be (a key): it must be a list for `mlxpaged serve`\n"
    assert program("config", "set", "api_key", "a-key-of-sixteen").code == 0
    assert "a-key-of-sixteen" not in program("serve", "scripted").err + str(settings_file().advice)


UNREAD = """
temprature = 0.5
max-tokens = 5
model_folders = []

[chats]
system = "x"

[run]
temperature = 0.5
on_switch = "wait"

[empty]
"""


def test_what_no_command_reads_is_one_line_and_stops_nothing(program: Program, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(UNREAD)
    told = (
        "temprature (did you mean temperature?), max-tokens (did you mean max_tokens?), [chats] (did you mean [chat]?)"
    )
    told += ", run.on_switch"
    ended = program("run", "scripted", "values")
    assert ended.code == 0 and ended.out.startswith("temperature=0.5")
    assert ended.err == f"mlxpaged: no command reads this in {file}: {told}\n"
    assert program("version").err == "" and program("run", "--help").err == ""
    found = settings_file()
    assert not found.problem and found.advice == f"no command reads {told}"


def test_serve_tells_what_no_command_reads_once(process: Program, file: Path) -> None:
    file.parent.mkdir()
    file.write_text("idle-exit = 9\n")
    ended = process("serve", "missing", "--port", "0")
    assert ended.err.splitlines() == [
        f"mlxpaged: no command reads this in {file}: idle-exit (did you mean idle_exit?)",
        "mlxpaged: no model at 'missing'",
    ]


def test_unset_takes_a_key_out_and_also_one_that_no_command_reads(program: Program, file: Path) -> None:
    file.parent.mkdir()
    file.write_text("temprature = 1\ntop_p = 0.5\n[chat]\ntop-k = 3\nseed = 4\n")
    for key in ("temprature", "top-p", "chat.top-k"):
        assert program("config", "unset", key).code == 0
    assert file.read_text() == "[chat]\nseed = 4\n"
    ended = program("config", "unset", "chat.top-p")
    assert (ended.code, ended.err) == (2, "mlxpaged: chat.top_p is not set\n")
    ended = program("config", "unset", "temprature")
    assert ended.code == 2 and "did you mean temperature?" in ended.err


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


def test_keys_of_the_app_are_set_by_the_names_of_actions(program: Program, file: Path) -> None:
    ended = program("config", "set", "keys.new-session", "ctrl+t")
    assert (ended.code, ended.err) == (0, "mlxpaged: Ctrl+T is new_session now; thinking has no key: give it one\n")
    assert file.read_text() == '[keys]\nnew_session = "ctrl+t"\n'
    ended = program("config", "set", "keys.thinking", '["ctrl+n", "f7"]')
    assert (ended.code, ended.err) == (0, "")
    assert program("config", "get", "keys.new_session").out == "ctrl+t\n"
    listed = program("config", "get", "keys").out
    assert 'keys.new_session = "ctrl+t"\n' in listed and 'keys.search = "ctrl+f"\n' in listed
    assert not settings_file().problem and program("run", "scripted", "x").code == 0


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("keys.new_sesion", "ctrl+t", "there is no action new_sesion for a key; there are send, new_line, "),
        ("keys.new_session", "ctrl+nonsense", "which is no key; write one such as ctrl+t"),
        ("keys.new_session", "n", "new_session cannot be n, which writes"),
    ],
)
def test_a_key_that_cannot_be_is_not_set(program: Program, file: Path, key: str, text: str, words: str) -> None:
    ended = program("config", "set", key, text)
    assert ended.code == 2 and words in ended.err and ended.err.count("\n") == 1
    assert not file.exists()


def test_wrong_keys_in_the_file_stop_no_other_command_and_doctor_tells_them(program: Program, file: Path) -> None:
    file.parent.mkdir()
    file.write_text('[keys]\nnew_sesion = "ctrl+t"\n')
    assert program("run", "scripted", "x").code == 0
    found = settings_file()
    assert found.problem and "there is no action new_sesion" in str(found.advice)
