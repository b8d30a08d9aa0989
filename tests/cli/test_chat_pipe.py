"""`mlxpaged chat` behind a pipe: a message per line, plain replies, nothing else on stdout."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.cli.conftest import PATIENCE_S, ROOT, SCRIPTED, Program


def test_every_line_is_answered_in_one_conversation(program: Program) -> None:
    ended = program("chat", "scripted", stdin="one\nshow\n")
    assert ended.out == "You said: one\nPROMPT [user/one] [assistant/You said: one] [user/show] [assistant/\n"
    assert (ended.code, ended.err) == (0, "")


def test_a_message_of_several_lines(program: Program) -> None:
    assert program("chat", "scripted", stdin='"""one\ntwo"""\n').out == "You said: one\ntwo\n"
    assert program("chat", "scripted", stdin="one\\\ntwo").out == "You said: one\ntwo\n"


def test_commands_work_and_say_nothing(program: Program) -> None:
    ended = program(
        "chat", "scripted", stdin="/params temperature=0.5\n/system be kind\nvalues\n/clear\nshow\n/bye\nnever\n"
    )
    assert ended.out == "temperature=0.5 top_p=1.0 seed=None\nPROMPT [system/be kind] [user/show] [assistant/\n"
    assert (ended.code, ended.err) == (0, "")


def test_a_wrong_command_and_a_broken_reply_are_told_and_make_the_exit_code_1(program: Program) -> None:
    ended = program("chat", "scripted", stdin="/nope\nfail\nafter\n")
    assert ended.out == "half an ans\nYou said: after\n"
    assert ended.err.splitlines() == [
        "mlxpaged: there is no /nope; /help lists the commands, // sends a text that starts with /",
        "mlxpaged: the reply broke off: the device is gone",
    ]
    assert ended.code == 1


def test_a_double_slash_and_a_path_are_text(program: Program) -> None:
    assert (
        program("chat", "scripted", stdin="//bye\n/usr/bin is what\n").out
        == "You said: /bye\nYou said: /usr/bin is what\n"
    )


def test_the_model_may_be_named_by_the_environment(program: Program) -> None:
    assert program("chat", stdin="hi\n", MLXPAGED_MODEL="scripted").out == "You said: hi\n"


def test_an_interrupt_while_it_waits_for_a_line_exits_130(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [*SCRIPTED, "chat", "scripted"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT
    ) as chat:
        assert chat.stdin and chat.stdout
        chat.stdin.write(b"one\n")
        chat.stdin.flush()
        assert chat.stdout.readline() == b"You said: one\n"
        chat.send_signal(signal.SIGINT)
        assert chat.wait(PATIENCE_S) == 130


@pytest.mark.parametrize("stdin", ["hi\n", ""])
def test_a_model_that_cannot_be_loaded_ends_it(program: Program, stdin: str) -> None:
    ended = program("chat", "missing", stdin=stdin)
    assert (ended.code, ended.out, ended.err) == (3, "", "mlxpaged: no model at 'missing'\n")
