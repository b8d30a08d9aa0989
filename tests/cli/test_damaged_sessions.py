"""A file of sessions that is damaged, cut short, locked or empty: each command says so in one line that names it."""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpaged.chat.store import Store
from tests.cli.conftest import Ended, Program

READERS = (
    ("sessions", "list"),
    ("sessions", "show", "Foxes"),
    ("sessions", "search", "quick"),
    ("sessions", "export", "Foxes"),
    ("sessions", "export", "--all"),
    ("sessions", "rename", "Foxes", "Wolves"),
)


@pytest.fixture
def file(environment: dict[str, str]) -> Path:
    """Forty conversations, closed; one of them is called Foxes."""
    store = Store(Path(environment["MLXPAGED_DATA"]) / "sessions.db")
    for number in range(40):
        session = store.create("scripted", title="Foxes" if number == 20 else "")
        store.ask(session.id, f"question {number} " + "x" * 2000)
        draft = store.reply(session.id)
        draft.feed("They are quick.")
        draft.finish("done")
        store.release(session.id)
    store.close()
    assert store.path
    return store.path


def middle(file: Path) -> None:
    """All but the first page is noise."""
    content = bytearray(file.read_bytes())
    content[4096:] = random.Random(0).randbytes(len(content) - 4096)
    file.write_bytes(content)


def header(file: Path) -> None:
    file.write_bytes(b"no database".ljust(100) + file.read_bytes()[100:])


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:9000])


def one_line(ended: Ended) -> str:
    assert ended.out == "" and ended.code == 1 and ended.err.count("\n") == 1
    return ended.err


@pytest.mark.parametrize("spoil", [middle, header, cut])
def test_a_command_on_a_damaged_file_names_the_damage_and_the_file(
    program: Program, file: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(file)
    for command in READERS:
        told = one_line(program(*command))
        assert f"{file} is damaged (" in told and "move it away with its -wal and -shm files" in told, command


@pytest.mark.parametrize("spoil", [middle, header, cut])
@pytest.mark.parametrize(
    ("wanted", "name"), [(("--session", "Foxes"), "'Foxes'"), (("-c",), "the last conversation")], ids=str
)
def test_going_on_with_a_conversation_that_cannot_be_read_begins_one_in_memory(
    program: Program, file: Path, spoil: Callable[[Path], None], wanted: tuple[str, ...], name: str
) -> None:
    spoil(file)
    damaged = file.read_bytes()
    ended = program("chat", "scripted", *wanted, stdin="hello\n/export json kept.json\n")
    assert (ended.code, ended.out) == (0, "You said: hello\n")
    told, rescued = ended.err.splitlines()
    assert told.startswith(f"mlxpaged: {name} cannot be read: {file} is damaged (")
    assert told.endswith(
        "close other chats, then move it away with its -wal and -shm files to start with an empty one. "
        "A new conversation begins in memory; /export writes it out."
    )
    assert "this conversation is in" in rescued and "`mlxpaged sessions import` takes it in" in rescued
    assert "hello" in (file.parents[1] / "kept.json").read_text()
    assert file.read_bytes() == damaged


def test_turns_that_cannot_be_read_are_never_shown_as_none(program: Program, file: Path) -> None:
    database = sqlite3.connect(file)
    root = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'message'").fetchone()[0]
    size = database.execute("PRAGMA page_size").fetchone()[0]
    database.close()
    content = bytearray(file.read_bytes())
    content[(root - 1) * size : root * size] = bytes(size)
    file.write_bytes(content)
    for command in READERS[1:4]:
        assert f"{file} is damaged (" in one_line(program(*command)), command


def test_a_locked_file_is_one_line_and_a_chat_goes_on_without_it(
    program: Program, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxpaged.chat.session_file.BUSY_MS", 10)
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    for command in READERS:
        assert f"{file} is locked by another program; close that one\n" in one_line(program(*command)), command
    ended = program("chat", "scripted", "--session", "Foxes", stdin="hello\n")
    assert (ended.code, ended.out) == (0, "You said: hello\n")
    assert ended.err.startswith(f"mlxpaged: 'Foxes' cannot be read: {file} is locked by another program")
    holder.close()


def test_an_empty_file_holds_no_conversations(program: Program, file: Path) -> None:
    file.write_bytes(b"")
    assert program("sessions", "list").out == "No saved conversations yet; `mlxpaged chat` begins one.\n"
    assert "there is no session 'Foxes'" in one_line(program("chat", "scripted", "--session", "Foxes", stdin="x\n"))
    assert "there is no conversation to continue yet" in program("chat", "-c", stdin="x\n").err


def test_a_title_nobody_has_is_still_an_error_in_a_sound_file(program: Program, file: Path) -> None:
    told = one_line(program("chat", "scripted", "--session", "Cats", stdin="x\n"))
    assert told == "mlxpaged: there is no session 'Cats'; `mlxpaged sessions list` shows them\n"


def test_damaged_figures_cost_the_figures_only(program: Program, file: Path) -> None:
    database = sqlite3.connect(file, isolation_level=None)
    database.execute("UPDATE message SET usage = 'torn'")
    database.execute("UPDATE session SET params = '{'")
    database.close()
    assert "They are quick." in program("sessions", "show", "Foxes").out


def zeroed(file: Path) -> None:
    """Four pages in the middle are nothing but zeros."""
    content = bytearray(file.read_bytes())
    middle = len(content) // 4096 // 2 * 4096
    content[middle : middle + 16384] = bytes(16384)
    file.write_bytes(content)


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("spoil", [zeroed, half])
def test_what_can_be_read_of_a_damaged_file_is_rescued_and_taken_in_by_a_new_one(
    program: Program, file: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(file)
    damaged = file.read_bytes()
    assert "`mlxpaged sessions rescue` saves what can still be read of it" in program("sessions", "export", "--all").err
    ended = program("sessions", "rescue")
    rescued, (told, way) = Path(ended.out.rstrip("\n")), ended.err.splitlines()
    assert ended.code == 0 and rescued.parent == file.parent and rescued.stat().st_mode & 0o777 == 0o600
    counts = re.fullmatch(
        rf"mlxpaged: (\d+) conversations and (\d+) messages saved from {re.escape(str(file))}; "
        r"at least (?:(\d+) conversations? and )?(\d+) messages? could not be read",
        told,
    )
    assert counts
    saved, messages, lost, lost_messages = (int(count or 0) for count in counts.groups())
    assert 0 < saved < saved + lost <= 40 and saved < messages < messages + lost_messages <= 80
    assert way == (
        f"mlxpaged: once {file} is moved away with its -wal and -shm files, `mlxpaged sessions import {rescued}` takes "
        "them in"
    )
    assert file.read_bytes() == damaged
    for one in file.parent.glob("sessions.db*"):
        one.rename(file.parents[1] / one.name)
    assert program("sessions", "import", str(rescued)).err == (
        f"mlxpaged: {saved} conversations taken in from {rescued}\n"
    )
    assert len(json.loads(program("sessions", "list", "--json").out)) == saved


def test_a_rescue_goes_where_it_is_told_and_over_nothing(program: Program, file: Path, tmp_path: Path) -> None:
    file.rename(tmp_path / "moved.db")
    ended = program("sessions", "rescue", "moved.db", "-o", "kept.json")
    assert (ended.code, ended.out) == (0, "kept.json\n")
    assert ended.err == (
        "mlxpaged: 40 conversations and 80 messages saved from moved.db; nothing is known to be missing\n"
        "mlxpaged: `mlxpaged sessions import kept.json` takes them in\n"
    )
    again = program("sessions", "rescue", "moved.db", "-o", "kept.json")
    assert (again.code, again.err) == (2, "mlxpaged: kept.json exists already; give --output another name\n")
    assert program("sessions", "import", "kept.json").code == 0


def test_a_file_that_is_no_database_has_nothing_to_rescue(program: Program, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database at all\n" * 1000)
    ended = program("sessions", "rescue", "notes.txt")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "mlxpaged: notes.txt is no file of conversations\n"
    absent = program("sessions", "rescue")
    assert absent.code == 2 and absent.err.endswith("sessions.db: No such file or directory\n")
