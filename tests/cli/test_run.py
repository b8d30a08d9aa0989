"""`mlxpaged run` through pipes: answers on stdout, everything else on stderr, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import PATIENCE_S, ROOT, SCRIPTED, Program, Terminal


def answered(args: list[str], environment: dict[str, str], stdin: int) -> tuple[int, bytes, bytes]:
    """How `mlxpaged run scripted ARGS` ends with this stdin: exit code, stdout, stderr."""
    done = subprocess.run(
        [*SCRIPTED, "run", "scripted", *args],
        stdin=stdin,
        capture_output=True,
        env=environment,
        cwd=ROOT,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_answer_and_nothing_else_is_on_stdout(program: Program) -> None:
    ended = program("run", "scripted", "hello")
    assert (ended.code, ended.out, ended.err) == (0, "You said: hello\n", "")


def test_the_prompt_comes_from_stdin_without_its_last_line_break(program: Program) -> None:
    assert program("run", "scripted", stdin="a\nb\n").out == "You said: a\nb\n"


def test_text_that_is_piped_in_goes_before_the_prompt(process: Program) -> None:
    assert process("run", "scripted", "Summarise this.", stdin="a\nb\n").out == "You said: a\nb\n\nSummarise this.\n"


def test_a_file_as_stdin_goes_before_the_prompt(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("notes\n")
    with (tmp_path / "notes").open("rb") as notes:
        assert answered(["hi", "--raw"], environment, notes.fileno()) == (0, b"You said: <s>notes\n\nhi\n", b"")


def test_a_stdin_without_text_changes_no_prompt(process: Program, environment: dict[str, str]) -> None:
    assert process("run", "scripted", "hello", stdin=" \n").out == "You said: hello\n"
    assert answered(["hello"], environment, subprocess.DEVNULL) == (0, b"You said: hello\n", b"")


def test_a_terminal_is_not_read_where_there_is_a_prompt(terminal: Callable[..., Terminal]) -> None:
    asked = terminal("run", "scripted", "hello")
    asked.until("You said: hello")
    assert asked.ended() == 0


def test_piped_text_that_is_not_utf_8_is_refused(process: Program) -> None:
    ended = process("run", "scripted", "hello", stdin=b"\xff\xfe")
    assert ended.code == 2 and "not UTF-8" in ended.err


def test_a_pipe_that_nobody_writes_to_is_told(environment: dict[str, str]) -> None:
    reading, writing = os.pipe()
    with subprocess.Popen(
        [*SCRIPTED, "run", "scripted", "hello"],
        stdin=reading,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    ) as process:
        os.close(reading)
        assert process.stdout and process.stderr
        assert b"waiting for the end of stdin" in process.stderr.readline()
        os.close(writing)
        assert process.stdout.read() == b"You said: hello\n"


def test_json_holds_the_text_the_ids_and_the_figures(program: Program) -> None:
    ended = program("run", "scripted", "hi", "--json")
    assert json.loads(ended.out) == {
        "text": "You said: hi",
        "token_ids": list(b"You said: hi"),
        "finish_reason": "stop",
        "prompt_tokens": 21,
        "completion_tokens": 12,
        "cached_tokens": 0,
        "ttft_s": 0.25,
        "tokens_per_s": 11.0,
    }


def test_the_system_message_goes_through_the_template(program: Program) -> None:
    ended = program("run", "scripted", "show", "--system", "be brief")
    assert ended.out == "PROMPT [system/be brief] [user/show] [assistant/\n"


def test_raw_continues_the_prompt_without_a_template(program: Program) -> None:
    assert program("run", "scripted", "once", "--raw").out == "You said: <s>once\n"


def test_a_model_without_a_template_gets_the_prompt_as_it_is(program: Program) -> None:
    assert program("run", "untemplated", "once").out == "You said: <s>once\n"
    refused = program("run", "untemplated", "once", "--system", "x")
    assert refused.code == 2
    assert refused.err.count("\n") == 1 and "--system needs a chat template" in refused.err


def test_flags_go_over_their_environment_variables(program: Program) -> None:
    ended = program(
        "run",
        "scripted",
        "values",
        "--top-p",
        "0.5",
        MLXPAGED_TOP_P="0.9",
        MLXPAGED_TEMPERATURE="0.7",
        MLXPAGED_SEED="4",
    )
    assert ended.out == "temperature=0.7 top_p=0.5 seed=4\n"


def test_control_sequences_pass_to_a_pipe_unchanged(program: Program) -> None:
    assert "\x1b[31mtext" in program("run", "scripted", "escape").out


def test_a_failed_step_keeps_what_came_and_exits_1(program: Program) -> None:
    ended = program("run", "scripted", "fail")
    assert (ended.code, ended.out, ended.err) == (1, "half an ans\n", "mlxpaged: the device is gone\n")
    record = json.loads(program("run", "scripted", "fail", "--json").out)
    assert (record["finish_reason"], record["error"]) == ("error", "the device is gone")


def test_an_interrupt_ends_the_reply_and_exits_130(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [*SCRIPTED, "run", "scripted", "stall"], stdout=subprocess.PIPE, env=environment, cwd=ROOT
    ) as process:
        assert process.stdout
        seen = b""
        while b"a time" not in seen:
            seen += os.read(process.stdout.fileno(), 100)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_a_reader_that_leaves_early_causes_no_noise(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [*SCRIPTED, "run", "scripted", "hello"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 0
