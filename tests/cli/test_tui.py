"""`mlxpaged tui` in a terminal: keys and pastes as bytes, a kill in mid-answer, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxpaged.chat.servers import ServerRecord
from mlxpaged.chat.store import Store
from mlxpaged.cli import tui as cli_tui
from mlxpaged.tui.app import TuiApp
from tests.cli.conftest import Program, Terminal

Open = Callable[..., Terminal]
SIZE = (30, 100)


def test_from_the_first_key_to_the_last(terminal: Open) -> None:
    tui = terminal("tui", "scripted", size=SIZE)
    tui.until("A new session")
    tui.type("markdown\r")
    shown = tui.until("The end.")
    assert "Some bold text." in shown and "return 1" in shown and "python" in shown
    tui.until("ttft")
    tui.type("one\ntwo and a half\\\r")  # Ctrl+J and a backslash start lines
    tui.until("two and a half")
    tui.type("\x1b\r")  # Alt+Enter
    tui.type("three\r")
    shown = tui.until("You said: one")
    assert "three" in shown.rpartition("You said: one")[2]
    tui.type("four five\x17six\x04\r")  # with something written Ctrl+W and Ctrl+D edit it
    tui.until("You said: four six")
    tui.type("\x11")
    assert tui.ended() == 0
    assert b"\x1b[?1049h" in tui.raw and b"\x1b[?1049l" in tui.raw  # the screen from before is back


def test_a_paste_of_500_lines_sends_nothing(terminal: Open) -> None:
    tui = terminal("tui", "scripted", size=SIZE)
    tui.until("A new session")
    tui.type("\x1b[200~" + "".join(f"show {number}\r" for number in range(500)) + "\x1b[201~")
    shown = tui.until("[pasted #1: 501 lines]")
    assert "A new session" in shown and "PROMPT" not in shown
    tui.type("\x03\x04")  # clear, then leave
    assert tui.ended() == 0


def test_escape_sequences_of_the_model_reach_no_terminal(terminal: Open) -> None:
    tui = terminal("tui", "scripted", size=SIZE)
    tui.until("A new session")
    tui.type("escape\r")
    assert "red ␛[31mtext␛]0;owned␇ and" in tui.until("more")
    tui.type("\x11")
    tui.ended()
    assert b"]0;owned\x07" not in tui.raw and b"\x9b2J" not in tui.raw.replace("�".encode(), b"")


def test_killed_in_mid_answer_it_opens_with_what_came_and_goes_on(terminal: Open, tmp_path: Path) -> None:
    store = Store(tmp_path / "data" / "sessions.db")

    def saved() -> list[str]:
        return [message.content for session in store.sessions() for message in store.messages(session.id)]

    tui = terminal("tui", "scripted", size=SIZE)
    tui.until("A new session")
    tui.type("stall\r")
    tui.until("Once upon a time")
    tui.until_true(lambda: saved() == ["stall", "Once upon a time"])
    tui.kill()
    tui = terminal("tui", "scripted", "--session", "stall", size=SIZE)
    tui.until("‖ interrupted", 2)  # in the list and under the reply
    tui.until("Once upon a time")
    tui.type("/continue\r")
    tui.until("ttft")
    tui.until("Once upon a time there was a fox")
    tui.type("\x11")
    assert tui.ended() == 0
    assert saved() == ["stall", "Once upon a time there was a fox"]
    store.close()


def test_killed_in_mid_message_it_opens_with_what_was_typed(terminal: Open, tmp_path: Path) -> None:
    drafts = tmp_path / "data" / "drafts"

    def kept(text: str) -> bool:
        return any(text in file.read_text() for file in drafts.glob("*.json"))

    tui = terminal("tui", "scripted", size=SIZE)
    tui.until("A new session")
    tui.type("never sent")
    tui.until_true(lambda: kept("never sent"))
    tui.kill()
    tui = terminal("tui", "scripted", size=SIZE)
    tui.until("never sent")
    tui.type("\x15")
    tui.until("Ask anything")
    tui.type("hello\r")
    tui.until("You said: hello")
    tui.type("and half a thought")
    tui.until_true(lambda: kept("half a thought"))
    tui.kill()
    tui = terminal("tui", "scripted", "--session", "hello", size=SIZE)
    tui.until("and half a thought")
    tui.type("\r")
    tui.until("You said: and half a thought")
    tui.type("\x11")
    assert tui.ended() == 0
    assert list(drafts.iterdir()) == []


def test_a_broken_model_is_one_line_and_the_way_out_stays_open(terminal: Open) -> None:
    tui = terminal("tui", "missing", size=SIZE)
    tui.until("! no model at 'missing'")
    tui.type("hello\r")
    tui.until("Ctrl+R retries")
    tui.type("\x04")
    assert tui.ended() == 0


def test_wrong_use_is_said_before_the_screen_is_taken(program: Program, terminal: Open) -> None:
    assert "tui needs a terminal" in program("tui", "scripted").err
    tui = terminal("tui", "scripted", "--theme", "mauve", size=SIZE)
    tui.until("--theme is 'mauve'; it must be one of")
    assert tui.ended() == 2
    tui = terminal("tui", "scripted", "--session", "nope", size=SIZE)
    tui.until("there is no session 'nope'")
    assert tui.ended() == 1 and b"\x1b[?1049h" not in tui.raw


def test_a_bug_is_one_line_that_names_its_log(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(app: TuiApp) -> None:
        app._exception = ValueError("a bug")

    monkeypatch.setattr(TuiApp, "run", breaks)
    monkeypatch.setattr(cli_tui, "end_with_terminal", lambda leave: None)
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(cli_tui, "sys", SimpleNamespace(stdin=terminal, stdout=terminal, platform="linux"))
    ended = program("tui", "scripted")
    assert ended.code == 1 and ended.err.count("\n") == 1
    assert ended.err.startswith("mlxpaged: unexpected ValueError: a bug; the traceback is in ")


def test_keys_of_config_toml_hold_and_wrong_ones_are_told(
    program: Program, terminal: Open, environment: dict[str, str]
) -> None:
    file = Path(environment["MLXPAGED_CONFIG"]) / "config.toml"
    file.parent.mkdir()
    file.write_text('[keys]\nnew_session = "alt+b"\nretri = "f7"\n')
    tui = terminal("tui", "scripted", size=SIZE)
    tui.until("Alt+B opens another")
    tui.until("there is no action retri")
    tui.type("\x1bb")
    tui.until("New session", 3)  # the title, and two in the list
    tui.type("\x11")
    assert tui.ended() == 0


def test_each_model_has_its_session_and_a_missing_one_costs_only_its_own(terminal: Open) -> None:
    tui = terminal("tui", "scripted", "missing", "untemplated", size=SIZE)
    tui.until("new · untemplated")
    tui.type("hello\r")
    tui.until("You said: hello")
    tui.type("\x1b2")
    tui.type("hello\r")
    tui.until("no model at 'missing'")
    tui.type("\x1b1")
    tui.until("You said: hello")
    tui.type("\x11")
    assert tui.ended() == 0


def test_a_server_is_told_of_folders_and_asked_for_names(
    terminal: Open, servers: Callable[[], list[ServerRecord]], tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    tui = terminal("tui", "scripted", str(folder), "nowhere", size=SIZE, ATTACHES="1")
    tui.until("nowhere is not there")  # the server that was started has no such model
    tui.type("\x1b2")
    tui.type("hello\r")
    tui.until("You said: hello")
    assert len(servers()) == 1
    tui.type("\x11")
    assert tui.ended() == 0
