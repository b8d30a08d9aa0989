"""What a person may get wrong: one clear line, the right exit code, nothing left behind. Over the real engine."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from tests.cli.conftest import Ended, Program

NO_INDEX = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_NO_INDEX": "0", "PIP_CONFIG_FILE": "/dev/null"}


def assert_one_line(ended: Ended, code: int, *words: str) -> None:
    assert ended.err.startswith("mlxpaged: ") and ended.err.count("\n") == 1, ended.err
    assert all(word in ended.err for word in words), ended.err
    assert (ended.code, ended.out) == (code, ""), ended.err


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_missing_file(program: Program, command: str) -> None:
    ended = program(command, "absent.gguf", stdin="hello", real=True)
    assert_one_line(ended, 3, "absent.gguf", "give")


def test_a_truncated_gguf(program: Program, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 7, 5) + b"\x10\x00")
    assert_one_line(program("run", "cut.gguf", "hi", real=True), 3, "cut.gguf")


def test_a_gguf_of_an_unsupported_version(program: Program, tmp_path: Path) -> None:
    (tmp_path / "odd.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 99, 0, 0) + bytes(64))
    assert_one_line(program("run", "odd.gguf", "hi", real=True), 3, "odd.gguf", "99")


def test_a_file_that_is_no_model(program: Program, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert_one_line(program("run", "notes.txt", "hi", real=True), 3, "notes.txt")


def test_an_unknown_model(program: Program) -> None:
    assert_one_line(program("run", "no-such-model", "hi", real=True), 3, "no-such-model", "smollm2")


def test_a_hub_model_while_offline(process: Program) -> None:
    ended = process("run", "nobody/nothing", "hi", real=True)
    assert ended.code in {3, 4}
    assert_one_line(ended, ended.code, "nobody/nothing")


def test_no_network_for_the_embedded_model(program: Program, tmp_path: Path) -> None:
    assert_one_line(program("run", "smollm2", "hi", real=True, **NO_INDEX), 4, "smollm2", "network")
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size] == []


@pytest.mark.parametrize("stdin", ["", " \n"])
def test_an_empty_prompt(program: Program, stdin: str) -> None:
    assert_one_line(program("run", "smollm2", stdin=stdin, real=True), 2, "the prompt is empty")


def test_a_prompt_that_is_not_text(program: Program) -> None:
    assert_one_line(program("run", "smollm2", stdin=b"\xff\xfe", real=True), 2, "not UTF-8")


def test_a_prompt_over_the_context(program: Program) -> None:
    ended = program("run", "scripted", "x" * 600)
    assert_one_line(ended, 1, "512 tokens", "619", "--ctx")


def test_a_port_in_use(program: Program) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        ended = program("serve", "scripted", "--port", str(port))
    assert_one_line(ended, 1, f"port {port}", "--port")


def test_no_server_at_the_address(program: Program) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    assert_one_line(program("chat", "--url", url, stdin="hi"), 4, url, "--url")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "smollm2", "hi", "--temperature", "-1"], ["--temperature is -1.0", "from 0 (greedy) to 2"]),
        (["run", "smollm2", "hi", "--temperature", "5"], ["--temperature is 5.0", "from 0 (greedy) to 2"]),
        (["chat", "smollm2", "--temperature", "5"], ["--temperature is 5.0", "from 0 (greedy) to 2"]),
        (["run", "smollm2", "hi", "--temperature", "nan"], ["--temperature is nan", "from 0 (greedy) to 2"]),
        (["run", "smollm2", "hi", "--top-p", "0"], ["--top-p is 0.0"]),
        (["run", "smollm2", "hi", "--max-tokens", "0"], ["--max-tokens is 0", "at least 1"]),
        (["run", "smollm2", "hi", "--dtype", "float8"], ["--dtype is 'float8'", "float32"]),
        (["run", "smollm2", "hi", "--ctx", "3"], ["--ctx is 3", "16"]),
        (["run", "smollm2", "hi", "--memory-budget", "lots"], ["--memory-budget is 'lots'", "6GB"]),
        (["run", "smollm2", "hi", "--raw", "--system", "x"], ["--system", "--raw"]),
        (["run", "smollm2", "hi", "--seed", "many"], ["--seed"]),
        (["run", "smollm2", "hi", "--seed", "18446744073709551615"], ["--seed is 18446744073709551615", "to 2^63-1"]),
        (["run"], ["MODEL", "mlxpaged run --help"]),
        (["serve", "smollm2", "--port", "70000"], ["--port", "'70000' is no port", "1 to 65535"]),
        (["serve", "smollm2", "--port", "abc"], ["--port", "'abc' is no port", "1 to 65535"]),
        (["serve", "smollm2", "--host", "0.0.0.0"], ["--host 0.0.0.0", "--insecure-no-auth"]),
        (["chat", "smollm2", "--top-k", "-2"], ["--top-k is -2"]),
        (["frobnicate"], ["frobnicate", "mlxpaged --help"]),
        (["run", "smollm2", "--frobnicate"], ["--frobnicate"]),
    ],
)
def test_a_wrong_flag_is_named_before_any_model_is_loaded(program: Program, args: list[str], words: list[str]) -> None:
    assert_one_line(program(*args, stdin="x"), 2, *words)


@pytest.mark.parametrize(
    ("args", "variable", "value", "words"),
    [
        (["run", "smollm2", "hi"], "MLXPAGED_TOP_P", "7", "--top-p (from MLXPAGED_TOP_P) is 7.0; it must be above 0"),
        (["chat", "smollm2"], "MLXPAGED_CTX", "3", "--ctx (from MLXPAGED_CTX) is 3; it must be at least 16"),
        (["run", "smollm2", "hi", "--top-p", "8"], "MLXPAGED_TOP_P", "7", "--top-p is 8.0; it must be above 0"),
        (["run", "smollm2", "hi", "--top-p", "8"], "MLXPAGED_TOP_K", "7", "--top-p is 8.0; it must be above 0"),
        (["bench", "engine", "smollm2"], "MLXPAGED_DTYPE", "float8", "--dtype (from MLXPAGED_DTYPE) is 'float8'"),
    ],
)
def test_a_variable_with_a_wrong_value_is_named(
    program: Program, args: list[str], variable: str, value: str, words: str
) -> None:
    assert_one_line(program(*args, stdin="x", **{variable: value}), 2, words)


def test_an_unexpected_error_is_one_line_and_its_traceback_is_kept(program: Program, tmp_path: Path) -> None:
    log = tmp_path / "state" / "last-error.log"
    assert_one_line(program("run", "broken", "hi"), 1, "unexpected KeyError: 'layers'", str(log), "--debug")
    assert "Traceback" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    shown = program("--debug", "run", "broken", "hi")
    assert (shown.code, "Traceback" in shown.err) == (1, True)
