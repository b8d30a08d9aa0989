"""`mlxpaged chat` in a terminal: keys, pastes, Ctrl-C, Ctrl-D, streaming, loading."""

from __future__ import annotations

import os
import shlex
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpaged.chat.servers import ServerRecord
from mlxpaged.cli.typeahead import PASTE_S
from tests.cli.conftest import SCRIPTED, Terminal

ENTER, NEW_LINE, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x03", "\x04"
READY = "/help for commands"

Open = Callable[..., Terminal]


def test_a_message_is_answered_with_its_figures(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    chat.type("hello" + ENTER)
    shown = chat.until("ttft")
    assert "You said: hello\nttft 0.25 s · 14.0 tok/s · 15 tokens · cached 0/24 · ctx 39/512" in shown


def test_markdown_is_formatted_once_and_code_stays_as_it_is(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    chat.type("markdown" + ENTER)
    shown = chat.until("ttft")
    reply = shown[shown.index("Title") : shown.index("ttft")]
    code = "```python\ndef f():\n    return 1\n```"
    assert reply == f"Title\n\nSome bold text.\n\n • one\n • two\n\n{code}\n\nThe end.\n"


def test_control_c_stops_a_reply_and_keeps_its_part_in_the_conversation(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    chat.type("stall" + ENTER)
    chat.until("Once upon a time")
    chat.type(CTRL_C)
    chat.until("· stopped")
    chat.until(READY)
    chat.type("show" + ENTER)
    shown = " ".join(chat.until("ttft", 2).split())
    assert "PROMPT [user/stall] [assistant/Once upon a time] [user/show] [assistant/" in shown


def test_control_c_before_the_first_word_takes_the_message_back(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    chat.type("silence" + ENTER)
    chat.until(">>> silence")
    chat.type(CTRL_C)
    chat.until("No reply came")
    chat.until(READY)
    chat.type("show" + ENTER)
    assert "silence]" not in chat.until("ttft")


def test_a_message_that_waits_for_others_says_how_many_go_before_it(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    chat.type("queue" + ENTER)
    chat.until("waiting, 3 ahead")
    chat.type(CTRL_C)
    assert "waiting" not in chat.until("your message was taken back")


def test_what_is_typed_while_a_reply_streams_waits_for_the_next_prompt(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    chat.type("stall" + ENTER)
    chat.until("Once upon a time")
    chat.type("typed early")
    chat.type(CTRL_C)
    shown = chat.until(">>> typed early")
    assert "timetyped" not in shown


def test_control_c_stops_a_reply_under_a_long_paste_which_waits_unsent(terminal: Open) -> None:
    chat = terminal("chat", "scripted", "--ctx", "30000")
    chat.until(READY)
    chat.type("stall" + ENTER)
    chat.until("Once upon a time")
    lines = "\r".join(f"{number:04} {'rain ' * 10}" for number in range(200))
    chat.type(f"\x1b[200~{lines}\x1b[201~")
    chat.type(CTRL_C)
    chat.until("· stopped")
    assert "You said" not in chat.until("... 0199")
    chat.type(ENTER)
    assert "0199 rain" in chat.until("ttft", 2).partition("You said: ")[2]


def test_lines_finished_while_a_reply_streams_are_sent_after_it_in_order(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    chat.type("stall" + ENTER)
    chat.until("Once upon a time")
    for keys in ("/think on" + ENTER, "early" + ENTER, "two\\" + ENTER, "lines" + ENTER, "a rest"):
        chat.type(keys)
        time.sleep(PASTE_S * 3)  # as long as a hand takes at least
    chat.type(CTRL_C)
    shown = chat.until(">>> a rest")
    places = [shown.index(text) for text in ("· stopped", "Thinking: on", "You said: early", "You said: two")]
    assert places == sorted(places)
    assert "You said: two\nlines\n" in shown
    chat.type(ENTER)
    chat.until("You said: a rest")


@pytest.mark.parametrize("paste", ["\x1b[200~one\rtwo\r\x1b[201~", "one\rtwo\r"])
def test_a_paste_while_a_reply_streams_sends_nothing_with_brackets_or_without(terminal: Open, paste: str) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    chat.type("stall" + ENTER)
    chat.until("Once upon a time")
    chat.type(paste)
    chat.type(CTRL_C)
    assert "You said" not in chat.until("... two")
    chat.type(ENTER)
    assert "one\ntwo\n" in chat.until("ttft", 2).partition("You said: ")[2]


def test_the_terminal_is_as_it_was_after_a_chat(terminal: Open) -> None:
    chat = terminal(command=("/bin/sh", "-c", f"{shlex.join(SCRIPTED)} chat scripted; stty -a"))
    chat.until(READY)
    chat.type("hello" + ENTER)
    chat.until("ttft")
    chat.until(READY)
    chat.type(CTRL_D)
    assert chat.ended() == 0
    words = chat.text().split()
    assert {"icrnl", "icanon", "iexten", "echo", "-noflsh"} <= {word.strip(";") for word in words}


def test_control_c_on_an_empty_line_hints_and_control_d_leaves(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    chat.type(CTRL_C)
    chat.until("Ctrl-D or /bye leaves")
    chat.type("x" + CTRL_C)
    chat.until(READY)
    chat.type(CTRL_D)
    assert chat.ended() == 0


def test_a_paste_of_many_lines_is_one_message_and_never_sends_itself(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    lines = "\r".join(f"line {number}" for number in range(1, 9)) + "\r"
    chat.type(f"\x1b[200~{lines}\x1b[201~")
    assert "You said" not in chat.until("... line 8")
    chat.type(ENTER)
    assert "line 8" in chat.until("ttft").partition("You said: ")[2]
    assert chat.text().count("You said") == 1


def test_a_paste_without_brackets_does_not_send_itself_either(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    chat.type("first\rsecond\rthird\r")
    chat.until("... third")
    chat.type("fourth" + ENTER)
    shown = chat.until("ttft")
    assert shown.count("You said") == 1
    assert "first\nsecond\nthird\nfourth" in shown.partition("You said: ")[2]


def test_messages_of_several_lines_by_key_backslash_and_quotes(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    for keys in ("one\\", ENTER, "two", NEW_LINE, "three", ENTER):
        chat.type(keys)
        chat.until(keys.strip("\\\r\x1b") or ">>>")
    assert "one\ntwo\nthree" in chat.until("ttft").partition("You said: ")[2]
    for keys in ('"""four', ENTER, 'five"""', ENTER):
        chat.type(keys)
        chat.until(keys.strip("\r") or ">>>")
    assert "four\nfive\nttft" in chat.until("ttft", 2)


def test_escape_sequences_of_a_model_reach_the_screen_as_signs(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    chat.type("escape" + ENTER)
    assert "red ␛[31mtext␛]0;owned␇ and �2J more" in chat.until("ttft")
    assert b"\x1b]0;owned" not in chat.raw


def test_the_prompt_is_there_before_the_model_and_a_message_waits_for_it(terminal: Open, tmp_path: Path) -> None:
    pipe = tmp_path / "loads"
    os.mkfifo(pipe)
    chat = terminal("chat", f"fifo:{pipe}")
    chat.until(READY)
    chat.until("loading")
    assert "Talking with" not in chat.text()
    chat.type("early" + ENTER)
    chat.until(">>> early")
    pipe.write_bytes(b"go")
    shown = chat.until("ttft")
    assert "You said: early" in shown
    assert "loading" not in shown[shown.index("You said") :]
    chat.until("Talking with fifo:")
    chat.until(READY)
    chat.type("/model scripted" + ENTER)
    chat.until("Now with scripted.")
    chat.until(READY)
    chat.type("/model scripted" + ENTER)
    chat.until("Still with scripted.")


@pytest.mark.parametrize(("typed", "answer"), [("early", "You said: early"), ("/stats", "\nmodel")])
def test_where_answers_come_from_is_said_above_the_first_one_also_to_who_asked_before_the_model_was_there(
    terminal: Open, servers: Callable[[], list[ServerRecord]], tmp_path: Path, typed: str, answer: str
) -> None:
    pipe = tmp_path / "loads"
    os.mkfifo(pipe)
    terminal("chat", f"fifo:{pipe}", ATTACHES="1").until_true(lambda: bool(servers()))
    chat = terminal("chat", f"fifo:{pipe}", ATTACHES="1")
    chat.until(READY)
    chat.type(typed + ENTER)
    chat.until(f">>> {typed}")
    pipe.write_bytes(b"go")
    chat.until(answer)
    shown = chat.until(READY)
    places = [shown.index(text) for text in (f">>> {typed}", "Attached to", "Talking with", answer)]
    assert places == sorted(places) and shown.count("Attached to") == 1


def test_a_chat_says_which_model_answers(terminal: Open) -> None:
    chat = terminal("chat")
    chat.until("Talking with smollm2.")
    assert chat.count("Talking with") == 1


def test_leaving_does_not_wait_for_a_load(terminal: Open, tmp_path: Path) -> None:
    pipe = tmp_path / "loads"
    os.mkfifo(pipe)
    chat = terminal("chat", f"fifo:{pipe}")
    chat.until(READY)
    chat.type(CTRL_D)
    assert chat.ended() == 0


def test_a_load_that_fails_ends_the_chat_with_its_reason(terminal: Open) -> None:
    chat = terminal("chat", "missing")
    assert chat.ended() == 3
    assert "mlxpaged: no model at 'missing'" in chat.text()


def test_a_reply_that_breaks_off_says_why_and_the_chat_goes_on(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    chat.type("fail" + ENTER)
    chat.until("the reply broke off: the device is gone")
    chat.type("again" + ENTER)
    chat.until("You said: again")


def test_a_message_over_the_context_is_taken_back(terminal: Open) -> None:
    chat = terminal("chat", "scripted", "--ctx", "64")
    chat.until(READY)
    chat.type("x" * 70 + ENTER)
    chat.until("your message was taken back")
    chat.type("ok" + ENTER)
    chat.until("You said: ok")


def test_no_color_gives_plain_text(terminal: Open) -> None:
    chat = terminal("chat", "scripted", NO_COLOR="1")
    chat.until(READY)
    chat.type("markdown" + ENTER)
    assert "Some **bold** text." in chat.until("ttft")


def test_history_is_kept_for_this_person_only(terminal: Open, environment: dict[str, str]) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    chat.type("remember me" + ENTER)
    chat.until("ttft")
    chat.until(READY)
    chat.type(CTRL_D)
    assert chat.ended() == 0
    history = Path(environment["MLXPAGED_STATE"]) / "chat-history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    again = terminal("chat", "scripted")
    again.until(READY)
    again.type("\x1b[A")
    again.until(">>> remember me")
