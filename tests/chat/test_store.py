"""The session store: what is on disk when, whatever becomes of the disk, the file or the process."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mlxpaged.chat.session_file import MIGRATIONS, memory
from mlxpaged.chat.sessions import short_id
from mlxpaged.chat.store import Store
from mlxpaged.engine.events import Timing, Usage
from mlxpaged.errors import NoSession, SessionBusy


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "sessions.db"


@pytest.fixture
def store(path: Path, clock: Clock) -> Store:
    return Store(path, clock, clock)


def said(store: Store, session_id: str) -> list[tuple[str, str, str]]:
    return [(one.role, one.content, one.state) for one in store.messages(session_id)]


def exchange(store: Store, session_id: str, question: str, answer: str) -> None:
    store.ask(session_id, question)
    draft = store.reply(session_id)
    draft.feed(answer)
    draft.finish("done", Usage(10, 2, 4), Timing(0.0, 0.1, 0.3))


def elsewhere(path: Path, code: str) -> str:
    """What a program prints that has opened the same file as `store`."""
    start = f"from mlxpaged.chat.store import Store; from pathlib import Path; store = Store(Path({str(path)!r}))\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_conversation_comes_back_as_it_was(store: Store, path: Path) -> None:
    session = store.create("m", "Be brief.", {"temperature": 0.5})
    exchange(store, session.id, "Hello 🦊 漢字\nsecond line", "Hi")
    assert store.close() is None
    again = Store(path)
    (found,) = again.sessions()
    assert (found.title, found.model, found.system, found.params) == (
        "Hello 🦊 漢字",
        "m",
        "Be brief.",
        {"temperature": 0.5},
    )
    assert (found.num_messages, found.interrupted, found.busy, found.last_state) == (2, False, False, "done")
    user, assistant = again.messages(found.id)
    assert (user.content, assistant.content) == ("Hello 🦊 漢字\nsecond line", "Hi")
    assert (assistant.usage, assistant.timing) == (Usage(10, 2, 4), Timing(0.0, 0.1, 0.3))


def test_the_file_and_its_folder_are_for_this_person_only(store: Store, path: Path) -> None:
    exchange(store, store.create().id, "Hello", "Hi")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == dict.fromkeys(("sessions.db", "sessions.db-wal", "sessions.db-shm"), 0o600)


def test_the_question_is_on_disk_before_anything_is_generated(store: Store, path: Path) -> None:
    session = store.create()
    store.ask(session.id, "Are you there?")
    assert elsewhere(path, "print(store.messages(store.sessions()[0].id)[0].content)") == "Are you there?"


def test_a_session_nobody_wrote_in_leaves_no_trace(store: Store, path: Path) -> None:
    store.release(store.create().id)
    other = store.create()
    store.rename(other.id, "named but empty")
    store.close()
    assert Store(path).sessions() == []


def test_a_reply_is_written_once_a_second(store: Store, path: Path, clock: Clock) -> None:
    session = store.create()
    store.ask(session.id, "Count")
    draft = store.reply(session.id)
    reader = Store(path)
    draft.feed("one ")
    assert reader.messages(session.id)[-1].content == ""
    clock.now += 1
    draft.feed("two ")
    assert reader.messages(session.id)[-1].content == "one two "
    draft.feed("three ")
    draft.tick()
    assert reader.messages(session.id)[-1].content == "one two "
    clock.now += 1
    draft.tick()
    assert reader.messages(session.id)[-1].content == "one two three "


def test_a_process_killed_in_mid_answer_leaves_an_interrupted_reply_that_goes_on(path: Path) -> None:
    code = (
        "import sys\nsession = store.create('m'); store.ask(session.id, 'Tell me')\n"
        "draft = store.reply(session.id); draft.feed('Once upon'); draft._next = 0; draft.feed(' a time')\n"
        "print(session.id, flush=True); sys.stdin.read()"
    )
    start = f"from mlxpaged.chat.store import Store; from pathlib import Path; store = Store(Path({str(path)!r}))\n"
    with subprocess.Popen(
        [sys.executable, "-c", start + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout
        session_id = writer.stdout.readline().decode().strip()
        store = Store(path)
        assert (store.session(session_id).busy, store.session(session_id).interrupted) == (True, False)
        with pytest.raises(SessionBusy, match="open in another mlxpaged"):
            store.claim(session_id)
        os.kill(writer.pid, signal.SIGKILL)
    assert (store.session(session_id).busy, store.session(session_id).interrupted) == (False, True)
    assert store.session(session_id).last_state == "interrupted"
    store.claim(session_id)
    assert said(store, session_id)[-1] == ("assistant", "Once upon a time", "interrupted")
    draft = store.resume(store.messages(session_id)[-1].id)
    draft.feed(" there was")
    draft.finish("done")
    assert said(Store(path), session_id)[-1] == ("assistant", "Once upon a time there was", "done")


def test_two_processes_write_without_losing_a_word(store: Store, path: Path) -> None:
    code = (
        "for number in range(40):\n    session = store.create(); store.ask(session.id, f'there {number}')\n"
        "    draft = store.reply(session.id); draft.feed('yes'); draft.finish('done')\nprint(store.problem)"
    )
    start = f"from mlxpaged.chat.store import Store; from pathlib import Path; store = Store(Path({str(path)!r}))\n"
    with subprocess.Popen([sys.executable, "-c", start + code], stdout=subprocess.PIPE, text=True) as other:
        for number in range(40):
            exchange(store, store.create().id, f"here {number}", "yes")
        assert other.stdout and other.stdout.read().strip() == "None"
    assert store.problem is None
    titles = {one.title for one in Store(path).sessions() if one.num_messages == 2}
    assert titles == {f"{place} {number}" for place in ("here", "there") for number in range(40)}


def test_a_new_title_from_another_process_survives_what_is_written_here(store: Store, path: Path) -> None:
    session = store.create()
    exchange(store, session.id, "Hello", "Hi")
    elsewhere(path, "store.rename(store.sessions()[0].id, 'Renamed')")
    exchange(store, session.id, "More", "Yes")
    store.close()
    (found,) = Store(path).sessions()
    assert (found.title, found.num_messages) == ("Renamed", 4)


def test_undo_retry_and_edit_keep_what_they_leave_behind(store: Store, path: Path) -> None:
    session = store.create()
    exchange(store, session.id, "one", "first")
    user = store.messages(session.id)[0]
    store.rewind(session.id, user.id)
    second = store.reply(session.id)
    second.feed("second")
    second.finish("done")
    assert [text for _, text, _ in said(store, session.id)] == ["one", "second"]
    store.rewind(session.id, None)
    store.ask(session.id, "edited")
    assert [text for _, text, _ in said(store, session.id)] == ["edited"]
    assert store.session(session.id).num_messages == Store(path).sessions()[0].num_messages == 1
    rows = sqlite3.connect(path).execute("SELECT content FROM message ORDER BY id").fetchall()
    assert {text for (text,) in rows} == {"one", "first", "second", "edited"}


def test_a_fork_is_a_session_of_its_own(store: Store) -> None:
    session = store.create("m", title="Main")
    exchange(store, session.id, "one", "first")
    exchange(store, session.id, "two", "second")
    fork = store.fork(session.id, store.messages(session.id)[1].id)
    exchange(store, fork.id, "other", "third")
    assert (fork.title, fork.parent, fork.model) == ("Main (fork)", session.id, "m")
    assert [text for _, text, _ in said(store, fork.id)] == ["one", "first", "other", "third"]
    assert [text for _, text, _ in said(store, session.id)] == ["one", "first", "two", "second"]


def test_a_session_is_found_by_title_by_id_and_by_the_id_as_it_is_shown(store: Store) -> None:
    first, second = store.create(title="Foxes"), store.create(title="Fobias")
    for one in (first, second):
        store.ask(one.id, "x")
    shown = short_id(first.id)
    assert {store.find(name).id for name in ("foxes", first.id, first.id.lower(), shown, shown[:4])} == {first.id}
    for name in ("cats", "", shown[:3], shown[-4:], first.id[:6], first.id[:-1]):
        with pytest.raises(NoSession, match=f"there is no session '{name}'; `mlxpaged sessions list`"):
            store.find(name)
    with pytest.raises(NoSession, match=f"there is no session 'fox'; is it {shown} \\(Foxes\\)"):
        store.find("fox")


def test_a_name_of_several_sessions_is_refused_with_ids_that_differ(store: Store) -> None:
    first, second = store.create(title="Foxes"), store.create()
    for one in (first, second):
        store.ask(one.id, "x")
    store.rename(second.id, "foxes")
    ids = [f"{short_id(second.id)} \\(foxes\\)", f"{short_id(first.id)} \\(Foxes\\)"]
    with pytest.raises(NoSession, match=f"2 sessions are called 'FOXES': {', '.join(ids)}; give the id of one"):
        store.find("FOXES")
    store.rename(second.id, short_id(first.id)[:4])  # a title like the start of another's id
    with pytest.raises(NoSession, match="2 sessions are called"):
        store.find(short_id(first.id)[:4])


def test_search_knows_no_case_and_no_wildcards(store: Store) -> None:
    first, second = store.create(), store.create()
    exchange(store, first.id, "What costs 100%?", "Äpfel")
    exchange(store, second.id, "What costs 1000?", "Pears")
    assert [(one.title, hit and hit.content) for one, hit in store.search("100%")] == [("What costs 100%?",) * 2]
    assert [one.id for one, _ in store.search("äPFEL")] == [first.id]


def test_search_knows_titles_and_leaves_out_turns_that_were_left_behind(store: Store, path: Path) -> None:
    session = store.create()
    exchange(store, session.id, "a wombat?", "Yes.")
    store.rename(session.id, "The 🐉")
    store.rewind(session.id, None)
    store.ask(session.id, "an emu?")
    for reader in (store, Store(path)):
        assert [(one.id, hit) for one, hit in reader.search("🐉")] == [(session.id, None)]
        assert reader.search("wombat") == []
        assert [hit and hit.content for _, hit in reader.search("EMU")] == ["an emu?"]


def test_a_title_goes_with_the_first_message_that_gave_it(store: Store) -> None:
    session, named = store.create(), store.create()
    for one in (session, named):
        exchange(store, one.id, "one", "first")
    store.rename(named.id, "Mine")
    for one in (session, named):
        store.rewind(one.id, None)
        store.ask(one.id, "another")
    assert (store.session(session.id).title, store.session(named.id).title) == ("another", "Mine")


def test_export_is_markdown_to_read_or_json_with_everything(store: Store) -> None:
    session = store.create("m", "Be brief.")
    exchange(store, session.id, "Hello", "Hi")
    shown = store.export(session.id)
    assert shown.startswith("# Hello\n\n_model m, ")
    assert "## System\n\nBe brief.\n\n## User\n\nHello\n\n## Assistant\n\nHi\n" in shown
    record = json.loads(store.export(session.id, "json"))
    assert [one["content"] for one in record["messages"]] == ["Hello", "Hi"]
    assert record["messages"][1]["usage"] == {"prompt_tokens": 10, "completion_tokens": 2, "cached_tokens": 4}


def test_a_removed_session_is_gone_with_its_words(store: Store, path: Path) -> None:
    session = store.create()
    exchange(store, session.id, "a secret word", "Hi")
    store.remove(session.id)
    store.close()
    assert Store(path).sessions() == []
    assert b"a secret word" not in path.read_bytes()


def test_ephemeral_touches_nothing(tmp_path: Path) -> None:
    store = Store(None)
    session = store.create()
    exchange(store, session.id, "Hello", "Hi")
    assert [text for _, text, _ in said(store, session.id)] == ["Hello", "Hi"]
    assert store.problem is None and not store.unsaved and store.close() is None
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_loses_nothing_and_saving_goes_on_by_itself(store: Store, path: Path, clock: Clock) -> None:
    session = store.create()
    exchange(store, session.id, "before", "yes")
    assert store._tables.file
    pages = store._tables.file.execute("PRAGMA page_count").fetchone()[0]
    store._tables.file.execute(f"PRAGMA max_page_count = {pages}")
    exchange(store, session.id, "while full " + "x" * 200_000, "still answered")
    assert store.problem == f"the disk of {path} is full; free some space and saving goes on"
    assert [text[:10] for _, text, _ in said(store, session.id)] == ["before", "yes", "while full", "still answ"]
    assert "still answered" in store.export(session.id)
    assert len(Store(path).messages(session.id)) == 2
    store._tables.file.execute("PRAGMA max_page_count = 1000000")
    clock.now += 10
    exchange(store, session.id, "after", "yes")
    assert store.problem is None
    assert len(Store(path).messages(session.id)) == 6


def test_what_cannot_be_saved_at_the_end_goes_into_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a-file-where-a-folder-should-be"
    blocked.write_text("")
    monkeypatch.setenv("MLXPAGED_DATA", str(blocked / "data"))
    monkeypatch.setenv("MLXPAGED_STATE", str(tmp_path))
    store = Store.open()
    assert store.problem and "MLXPAGED_DATA names another folder" in store.problem
    session = store.create()
    exchange(store, session.id, "Hello", "Hi")
    assert len(store.sessions()) == 1
    rescued = store.close()
    assert rescued and rescued.parent == tmp_path and stat.S_IMODE(rescued.stat().st_mode) == 0o600
    (record,) = json.loads(rescued.read_text())
    assert [one["content"] for one in record["messages"]] == ["Hello", "Hi"]


def test_a_locked_file_delays_and_a_damaged_one_never_stops(path: Path, clock: Clock, tmp_path: Path) -> None:
    store = Store(path, clock, clock)
    session = store.create()
    assert store._tables.file
    store._tables.file.execute("PRAGMA busy_timeout = 10")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    store.ask(session.id, "Hello")
    assert store.problem == f"{path} is locked by another program; close that one"
    holder.execute("ROLLBACK")
    clock.now += 10
    store.reply(session.id).finish("done")
    assert store.problem is None and len(Store(path).messages(session.id)) == 2

    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"no database at all " * 100)
    store = Store(damaged)
    assert store.problem and "is damaged" in store.problem and "with its -wal and -shm files" in store.problem
    exchange(store, store.create().id, "Hello", "Hi")
    assert len(store.sessions()) == 1
    assert damaged.read_bytes().startswith(b"no database")


def test_a_file_damaged_in_the_middle_says_so_and_the_open_session_stays(store: Store, path: Path) -> None:
    session = store.create()
    for number in range(30):
        exchange(store, session.id, f"question {number} " + "x" * 2000, "answer")
    store.close()
    content = bytearray(path.read_bytes())
    for page in range(2, len(content) // 4096):
        content[page * 4096 : page * 4096 + 512] = os.urandom(512)
    path.write_bytes(content)
    again = Store(path)
    again.sessions()
    fresh = again.create()
    exchange(again, fresh.id, "Hello", "Hi")
    assert again.problem and "is damaged" in again.problem
    assert [text for _, text, _ in said(again, fresh.id)] == ["Hello", "Hi"]


@pytest.mark.skipif(os.getuid() == 0, reason="needs a user whom permissions bind: root writes everywhere")
def test_a_folder_that_cannot_be_written_can_be_read(store: Store, path: Path) -> None:
    exchange(store, store.create().id, "Hello", "Hi")
    store.close()
    path.parent.chmod(0o500)
    try:
        again = Store(path)
        (session,) = again.sessions()
        assert again.problem is None and "Hi" in again.export(session.id)
        exchange(again, session.id, "More", "Yes")
        assert "MLXPAGED_DATA names another folder" in (again.problem or "")
        assert "Yes" in again.export(session.id)
    finally:
        path.parent.chmod(0o700)


def test_a_file_of_a_newer_schema_is_left_alone(path: Path) -> None:
    Store(path).close()
    file = sqlite3.connect(path)
    file.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    file.close()
    assert "written by a newer mlxpaged" in (Store(path).problem or "")


def test_an_older_file_is_copied_then_migrated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(path)
    exchange(store, store.create().id, "Hello", "Hi")
    store.close()
    monkeypatch.setattr("mlxpaged.chat.session_file.MIGRATIONS", (*MIGRATIONS, "ALTER TABLE session ADD COLUMN x TEXT"))
    migrated = Store(path)
    assert migrated.problem is None
    assert [one.title for one in migrated.sessions()] == ["Hello"]
    copy = path.with_name("sessions.db.schema1")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert sqlite3.connect(copy).execute("SELECT title FROM session").fetchall() == [("Hello",)]


def test_the_schema_in_memory_is_the_files(store: Store) -> None:
    tables, file = "SELECT name, sql FROM sqlite_master ORDER BY name", store._tables.file
    assert file
    assert [tuple(row) for row in file.execute(tables)] == [tuple(row) for row in memory().execute(tables)]
