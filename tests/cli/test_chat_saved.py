"""`mlxpaged chat` and what it keeps: sessions that go on, replies cut short, disks that fail, servers that come and
go. Real processes in a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mlxpaged.chat.servers import ServerRecord
from mlxpaged.chat.sessions import Message
from mlxpaged.chat.store import Store
from tests.cli.conftest import Program, Terminal, kill_server
from tests.cli.test_chat_terminal import CTRL_C, CTRL_D, ENTER, READY

Open = Callable[..., Terminal]
UP = "\x1b[A"


@pytest.fixture
def store(environment: dict[str, str]) -> Callable[[], Store]:
    return lambda: Store(Path(environment["MLXPAGED_DATA"]) / "sessions.db")


def talk(chat: Terminal, text: str, count: int = 1) -> str:
    chat.until(READY)
    chat.type(text + ENTER)
    return chat.until("ttft", count)


def leave(chat: Terminal) -> None:
    chat.until(READY)
    chat.type(CTRL_D)
    assert chat.ended() == 0


def test_the_last_conversation_goes_on_where_it_stopped(terminal: Open, store: Callable[[], Store]) -> None:
    first = terminal("chat", "scripted", "-s", "be kind")
    talk(first, "emoji 🦊 漢字")
    leave(first)
    again = terminal("chat", "-c")
    shown = again.until(READY)
    assert "· 2 turns" in shown and "> emoji" in shown and "You said: emoji" in shown
    again.type("show" + ENTER)
    shown = again.until("ttft").replace("\n", "")
    assert "[system/be kind] [user/emoji" in shown and "[assistant/You said: emoji" in shown
    leave(again)
    (session,) = store().sessions()
    assert (session.title, session.num_messages, session.model) == ("emoji 🦊 漢字", 4, "scripted")


def test_a_flag_of_one_call_is_none_of_the_next(
    terminal: Open, program: Program, store: Callable[[], Store], environment: dict[str, str]
) -> None:
    chat = terminal("chat", "scripted", "--seed", "3")
    talk(chat, "values")
    assert "temperature=0.0 top_p=1.0 seed=3" in chat.text()
    leave(chat)
    folder = Path(environment["MLXPAGED_CONFIG"])
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text("temperature = 0.5\nseed = 4\n")
    flags = "temperature=0.5 top_p=1.0 seed={}\n".format
    assert program("chat", "-c", "--seed", "8", stdin="values\n").out == flags(8)
    assert program("chat", "-c", stdin="values\n/params seed 5\nvalues\n").out == flags(4) + flags(5)
    assert program("chat", "-c", stdin="values\n").out == flags(5)  # the session's own, over the configuration's
    assert program("chat", "-c", "--seed", "8", stdin="values\n").out == flags(8)
    (session,) = store().sessions()
    assert session.params == {"seed": 5}


def test_a_message_that_was_taken_back_is_no_turn_of_the_list(terminal: Open, program: Program) -> None:
    chat = terminal("chat", "scripted", "--ctx", "64")
    talk(chat, "ok")
    chat.until(READY)
    chat.type("x" * 70 + ENTER)
    chat.until("your message was taken back")
    leave(chat)
    (line,) = program("sessions", "list").out.splitlines()[1:]
    assert line.endswith("  2      ok")


def test_killed_in_mid_answer_the_reply_is_there_marked_and_goes_on(terminal: Open, store: Callable[[], Store]) -> None:
    chat = terminal("chat", "scripted")
    chat.until(READY)
    chat.type("stall" + ENTER)
    chat.until_true(lambda: any(one.content == "Once upon a time" for one in _replies(store())))
    chat.kill()
    (session,) = store().sessions()
    assert (session.title, session.interrupted) == ("stall", True)
    again = terminal("chat", "-c")
    again.until("This reply was interrupted; /continue goes on with it.")
    again.until(READY)
    again.type("/continue" + ENTER)
    again.until("ttft")
    leave(again)
    assert [one.content for one in _replies(store())] == ["Once upon a time there was a fox"]


def _replies(store: Store) -> list[Message]:
    return [one for session in store.sessions() for one in store.messages(session.id) if one.role == "assistant"]


def test_a_question_whose_process_died_before_the_model_was_there_is_kept(
    terminal: Open, store: Callable[[], Store], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "never")
    chat = terminal("chat", f"fifo:{tmp_path / 'never'}")
    chat.until(READY)
    chat.type("are you there" + ENTER)
    chat.until_true(lambda: bool(store().sessions()))
    chat.kill()
    again = terminal("chat", "scripted", "-c")
    again.until("Your last message got no reply; /continue asks for it.")
    again.until(READY)
    again.type("/continue" + ENTER)
    assert "You said: are you there" in again.until("ttft")


def test_stop_continue_retry_edit_and_undo_at_the_prompt(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    talk(chat, "one")
    chat.until(READY)
    chat.type("/edit" + ENTER)
    chat.until(">>> one")
    chat.type(" more" + ENTER)
    chat.until("You said: one more")
    chat.until(READY)
    chat.type("/retry" + ENTER)
    chat.until("ttft", 3)
    chat.until(READY)
    chat.type("/undo" + ENTER)
    chat.until("Taken back: one more")
    talk(chat, "show", 4)
    assert "PROMPT [user/show] [assistant/" in " ".join(chat.text().split())


def test_a_reply_that_came_to_its_limit_goes_on_also_in_the_next_chat(
    terminal: Open, store: Callable[[], Store]
) -> None:
    chat = terminal("chat", "scripted")
    assert "· cut at its longest; /continue goes on" in talk(chat, "long").replace("\n", " ")
    leave(chat)
    again = terminal("chat", "-c")
    again.until("This reply was cut at its longest; /continue goes on with it.")
    talk(again, "/continue")
    assert [(one.content, one.state) for one in _replies(store())] == [("It was a dark and stormy night", "done")]


def test_500_pasted_lines_are_one_message(terminal: Open, store: Callable[[], Store]) -> None:
    chat = terminal("chat", "scripted", "--ctx", "100000")
    chat.until(READY)
    lines = "\r".join(f"line {number} 漢字🦊" for number in range(500))
    chat.type(f"\x1b[200~{lines}\x1b[201~")
    chat.until("line 499")
    assert store().sessions() == []
    chat.type(ENTER)
    chat.until("ttft")
    leave(chat)
    (session,) = store().sessions()
    question = store().messages(session.id)[0].content
    assert question == "\n".join(f"line {number} 漢字🦊" for number in range(500))


def test_control_c_before_the_prompt_is_there_ends_it(terminal: Open) -> None:
    chat = terminal("chat", "scripted")
    chat.type(CTRL_C)
    assert chat.ended() in {130, -signal.SIGINT, 1}  # 1: Python itself was not up yet


def test_control_c_while_it_loads_hints_then_stops_the_message_that_waits(terminal: Open, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "loads")
    chat = terminal("chat", f"fifo:{tmp_path / 'loads'}")
    chat.until("loading")
    chat.type(CTRL_C)
    chat.until("Ctrl-D or /bye leaves")
    chat.until(READY)
    chat.type("early" + ENTER)
    chat.until(">>> early")
    chat.type(CTRL_C)
    chat.until("No reply came; your message was taken back.")
    leave(chat)


def test_a_file_moved_away_under_a_chat_is_one_line_and_every_word_comes_back(
    terminal: Open, program: Program, environment: dict[str, str], store: Callable[[], Store]
) -> None:
    file = Path(environment["MLXPAGED_DATA"]) / "sessions.db"
    chat = terminal("chat", "scripted", size=(30, 300))
    talk(chat, "before")
    file.rename(f"{file}.old")
    talk(chat, "after", 2)
    chat.until(f"not saved: {file} was moved or removed while it was open.")
    leave(chat)
    (rescued,) = file.parent.glob("mlxpaged-unsaved-*.json")
    assert chat.count(f"this conversation is in {rescued}") == 1
    parted = program("sessions", "import", str(rescued))
    assert parted.code == 1 and f"{file} was moved or removed without its -wal and -shm files" in parted.err
    for end in ("-wal", "-shm"):
        Path(f"{file}{end}").rename(f"{file}.old{end}")
    assert program("sessions", "import", str(rescued)).code == 0
    turns = store().messages(store().sessions()[0].id)
    assert [one.content for one in turns] == ["before", "You said: before", "after", "You said: after"]


def test_ephemeral_and_pipes_leave_no_session(
    terminal: Open, program: Program, environment: dict[str, str], store: Callable[[], Store]
) -> None:
    chat = terminal("chat", "scripted", "--ephemeral")
    talk(chat, "a secret")
    chat.until(READY)
    chat.type(UP)
    chat.until(">>> a secret", 2)
    chat.type(CTRL_C)
    leave(chat)
    assert not (Path(environment["MLXPAGED_STATE"]) / "chat-history").exists()
    assert program("chat", "scripted", stdin="from a script\n").code == 0
    assert store().sessions() == []


def test_a_pipe_may_go_on_with_a_session(terminal: Open, program: Program, store: Callable[[], Store]) -> None:
    chat = terminal("chat", "scripted")
    talk(chat, "first")
    leave(chat)
    ended = program("chat", "scripted", "--session", "first", stdin="show\n")
    assert ended.out == "PROMPT [user/first] [assistant/You said: first] [user/show] [assistant/\n"
    assert store().sessions()[0].num_messages == 4
    missing = program("chat", "scripted", "--session", "nope", stdin="x\n")
    assert (missing.code, missing.err) == (
        1,
        "mlxpaged: there is no session 'nope'; `mlxpaged sessions list` shows them\n",
    )
    assert program("chat", "-c", "--ephemeral").code == 2


def test_a_session_open_elsewhere_is_not_opened_twice(
    terminal: Open, program: Program, store: Callable[[], Store]
) -> None:
    chat = terminal("chat", "scripted")
    talk(chat, "mine")
    other = program("chat", "scripted", "--session", "mine", stdin="x\n")
    assert other.code == 1
    assert "is open in another mlxpaged" in other.err
    assert "there is no conversation to continue yet" in program("chat", "-c", stdin="x\n").err


def test_going_on_with_another_conversation_than_the_last_is_said(terminal: Open, program: Program) -> None:
    before = terminal("chat", "scripted")
    talk(before, "first")
    leave(before)
    chat = terminal("chat", "scripted")
    talk(chat, "mine")
    ended = program("chat", "-c", stdin="show\n")
    assert ended.err == "mlxpaged: 'mine' is open elsewhere; this is the one before it.\n"
    assert "[user/first]" in ended.out
    leave(chat)
    assert program("chat", "-c", stdin="x\n").err == ""


def test_a_locked_or_damaged_database_is_one_line_and_the_chat_goes_on(
    terminal: Open, environment: dict[str, str]
) -> None:
    file = Path(environment["MLXPAGED_DATA"]) / "sessions.db"
    file.parent.mkdir()
    file.write_bytes(b"this is no database" * 100)
    chat = terminal("chat", "scripted")
    chat.until("is damaged")
    talk(chat, "hello")
    chat.until(READY)
    chat.type("/export json kept.json" + ENTER)
    chat.until("Written to kept.json.")
    chat.until(READY)
    chat.type(CTRL_D)
    assert chat.ended() == 0
    assert chat.count("this conversation is in") == 1
    assert file.read_bytes().startswith(b"this is no database")


def test_a_message_that_no_model_could_be_loaded_for_is_taken_back(
    program: Program, store: Callable[[], Store]
) -> None:
    saved = store()
    session = saved.create("scripted")
    saved.ask(session.id, "first")
    saved.reply(session.id).finish("done")
    saved.close()
    assert program("chat", "missing", "-c", stdin="hi\n").code == 3
    assert [one.content for one in store().messages(session.id)] == ["first", ""]


def test_a_home_that_cannot_be_written_is_one_line(terminal: Open, environment: dict[str, str]) -> None:
    Path(environment["MLXPAGED_DATA"]).write_text("a file where the folder should be")
    chat = terminal("chat", "scripted")
    chat.until("MLXPAGED_DATA names another")
    assert "You said: hello" in talk(chat, "hello")


def test_a_full_disk_is_one_line_and_the_words_stay(
    terminal: Open, environment: dict[str, str], store: Callable[[], Store]
) -> None:
    store().close()
    limit = "import resource, sys, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000)); "
    run = "sys.argv[:] = ['mlxpaged', *sys.argv[1:]]; runpy.run_module('tests.cli.program', run_name='__main__')"
    chat = terminal("chat", "scripted", "--ctx", "4000", command=(sys.executable, "-c", limit + run))
    asked = 0
    while not chat.count("not saved:"):
        asked += 1
        talk(chat, f"question {asked} ", asked)
        chat.until(READY)
    assert chat.count("is the disk or the quota full?") == 1
    assert f"You said: question {asked + 1}" in talk(chat, f"question {asked + 1}", asked + 1)
    chat.until(READY)
    chat.type("/export kept.md" + ENTER)
    chat.until("Written to kept.md.")
    kept = (Path(environment["HOME"]) / "kept.md").read_text()
    assert all(f"You said: question {number}" in kept for number in range(1, asked + 2))


def test_two_chats_share_one_server_which_a_crash_of_one_does_not_harm(
    terminal: Open, servers: Callable[[], list[ServerRecord]]
) -> None:
    first = terminal("chat", "scripted", ATTACHES="1")
    first.until("Started a server in the background at")
    (server,) = servers()
    first.until(f"{server.url}/v1 (pid {server.pid})")
    assert "You said: one" in talk(first, "one")
    second = terminal("chat", ATTACHES="1")
    second.until(f"Attached to the server at {server.url} (pid {server.pid}).")
    talk(second, "two")
    first.until(READY)
    first.type("stall" + ENTER)
    first.until("Once upon a time")
    first.kill()
    assert "You said: three" in talk(second, "three", 2)
    assert servers() == [server]


def test_a_server_that_ends_between_two_questions_is_started_again(
    terminal: Open, servers: Callable[[], list[ServerRecord]]
) -> None:
    chat = terminal("chat", "scripted", ATTACHES="1")
    talk(chat, "one")
    (server,) = servers()
    kill_server(server.pid)
    assert "You said: two" in talk(chat, "two", 2)
    (other,) = servers()
    assert other.pid != server.pid
    chat.until(READY)
    assert chat.count(f"Started a server in the background at {other.url}/v1 (pid {other.pid})") == 1


def test_a_wrong_model_leaves_the_one_before_in_use(terminal: Open, servers: Callable[[], list[ServerRecord]]) -> None:
    chat = terminal("chat", "scripted", ATTACHES="1")
    chat.until("Started a server")
    chat.until(READY)
    chat.type("/model missing" + ENTER)
    chat.until("does not load missing")
    chat.until(READY)
    chat.type("/stats" + ENTER)
    chat.until("model     scripted")
    chat.until(READY)
    chat.type("/model" + ENTER)
    chat.until("* scripted  ready")
    assert "You said: one" in talk(chat, "one")
    assert "not attached" not in chat.text()
    assert len(servers()) == 1


def test_a_server_that_dies_in_mid_answer_keeps_what_came(
    terminal: Open, servers: Callable[[], list[ServerRecord]], store: Callable[[], Store]
) -> None:
    chat = terminal("chat", "scripted", ATTACHES="1")
    chat.until(READY)
    chat.type("stall" + ENTER)
    chat.until("Once upon a time")
    kill_server(servers()[0].pid)
    chat.until("the reply broke off: the server's connection ended in mid-reply")
    chat.until("/continue goes")
    chat.until(READY)
    chat.type("/continue" + ENTER)
    chat.until("there was a fox")
    leave(chat)
    assert [one.content for one in _replies(store())] == ["Once upon a time there was a fox"]


def test_a_chat_imports_no_mlx_and_is_a_process_of_its_own(
    environment: dict[str, str], servers: Callable[[], list[ServerRecord]], tmp_path: Path
) -> None:
    code = (
        "import sys, runpy, atexit\n"
        "names = {'mlx', 'mlx_lm', 'transformers', 'textual', 'starlette', 'uvicorn'}\n"
        "def say(*_): print(sorted(names & {n.split('.')[0] for n in sys.modules}))\n"
        "atexit.register(say)\nsys.argv[:] = ['mlxpaged', 'chat', 'scripted']\n"
        "runpy.run_module('tests.cli.program', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="hi\n",
        capture_output=True,
        text=True,
        env=environment | {"ATTACHES": "1"},
        cwd=tmp_path,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["You said: hi", "[]"], done.stderr
    assert "mlxpaged: Started a server in the background" in done.stderr
    assert len(servers()) == 1


def test_an_address_nobody_listens_at(program: Program, environment: dict[str, str]) -> None:
    ended = program("chat", "--url", "http://127.0.0.1:9", stdin="x\n")
    assert ended.code == 4
    assert ended.err.startswith("mlxpaged: no server answers at http://127.0.0.1:9")


def test_a_server_that_crashes_and_begins_anew_answers_the_next_question(
    terminal: Open, servers: Callable[[], list[ServerRecord]]
) -> None:
    chat = terminal("chat", "scripted", ATTACHES="1")
    talk(chat, "one")
    (server,) = servers()
    (serving,) = psutil.Process(server.pid).children()
    serving.kill()
    assert "You said: two" in talk(chat, "two", 2)
    assert [one.pid for one in servers()] == [server.pid]
