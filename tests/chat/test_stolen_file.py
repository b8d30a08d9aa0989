"""The session file moved, removed, cut short or overwritten while a store has it open: nothing said is lost."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpaged.chat.sessions import from_json
from mlxpaged.chat.store import Store
from tests.chat.test_store import Clock, exchange, said


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("MLXPAGED_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("MLXPAGED_STATE", str(tmp_path / "state"))
    clock = Clock()
    return Store(tmp_path / "data" / "sessions.db", clock, clock)


def move(file: Path) -> None:
    file.rename(f"{file}.old")


def replace(file: Path) -> None:
    other = file.with_name("other.db")
    another_chat(other)
    move(file)
    other.rename(file)


def remove(file: Path) -> None:
    for one in file.parent.glob("sessions.db*"):
        one.unlink()


def truncate(file: Path) -> None:
    os.truncate(file, 0)


def cut(file: Path) -> None:
    os.truncate(file, 5000)


def overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(random.Random(0).randbytes(40_000))


def another_chat(file: Path) -> str:
    """In a process of its own; the problem it had."""
    code = (
        "import sys; from pathlib import Path; from mlxpaged.chat.store import Store\n"
        "store = Store(Path(sys.argv[1])); store.ask(store.create().id, 'from elsewhere'); store.close()\n"
        "print(store.problem or '', end='')"
    )
    asked = [sys.executable, "-c", code, str(file)]
    return subprocess.run(asked, check=True, timeout=60, capture_output=True, text=True).stdout


THEFTS = [
    (move, "was moved or removed"),
    (replace, "was moved or replaced"),
    (remove, "was moved or removed"),
    (truncate, "was cut short"),
    (cut, "was cut short"),
    (overwrite, "was overwritten"),
]


def settled(store: Store) -> None:
    """All that was written so far is in the file itself, not in its -wal."""
    assert store.path
    database = sqlite3.connect(store.path)
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    store.rename(store.sessions()[0].id, "open")


def words(rescued: Path | None) -> dict[str, list[str]]:
    """The turns in a rescued file, by the title of their conversation."""
    assert rescued
    found = [from_json(record) for record in json.loads(rescued.read_text())]
    return {session.title: [one.content for one in turns] for session, turns in found}


@pytest.mark.parametrize(("steal", "told"), THEFTS)
def test_every_word_outlives_a_file_taken_away_between_two_questions(
    store: Store, steal: Callable[[Path], None], told: str
) -> None:
    assert store.path
    left = store.create(title="left")
    exchange(store, left.id, "long ago", "yes")
    store.release(left.id)
    session = store.create(title="open")
    exchange(store, session.id, "before " + "x" * 9000, "yes")
    settled(store)
    steal(store.path)
    exchange(store, session.id, "after", "still")
    assert store.problem == f"{store.path} {told} while it was open" and store.unsaved
    assert [text[:6] for _, text, _ in said(store, session.id)] == ["before", "yes", "after", "still"]
    assert "still" in store.export(session.id)
    exchange(store, store.create(title="new").id, "and on", "yes")
    kept = words(store.close())
    assert [text[:6] for text in kept["open"]] == ["before", "yes", "after", "still"]
    assert (kept["left"], kept["new"]) == (["long ago", "yes"], ["and on", "yes"])


@pytest.mark.parametrize(("steal", "told"), THEFTS)
def test_a_file_taken_away_in_mid_reply_or_before_the_end_is_found_by_the_last_write(
    store: Store, steal: Callable[[Path], None], told: str
) -> None:
    assert store.path
    session = store.create(title="open")
    store.ask(session.id, "before " + "x" * 9000)
    draft = store.reply(session.id)
    draft.feed("half")
    settled(store)
    steal(store.path)
    draft.feed(" and half")
    draft.finish("done")
    assert words(store.close())["open"][1:] == ["half and half"]
    assert store.problem and told in store.problem


@pytest.mark.parametrize("moved", [("",), ("", "-wal")], ids=str)
def test_a_chat_beside_one_whose_file_was_moved_says_why_it_cannot_save_until_the_rest_is_moved_too(
    store: Store, moved: tuple[str, ...]
) -> None:
    """SQLite would delete the -wal file with all that is in no other file yet, or call it a disk I/O error."""
    assert store.path
    session = store.create(title="open")
    exchange(store, session.id, "before", "yes")
    elsewhere = store.path.with_name("elsewhere.db")
    for end in moved:
        Path(f"{store.path}{end}").rename(f"{elsewhere}{end}")
    assert another_chat(store.path) == (
        f"{store.path} was moved or removed without its -wal and -shm files; close other chats, then move those after "
        "it, or away where it is gone for good"
    )
    exchange(store, session.id, "after", "still")
    store.close()
    for end in ("-wal", "-shm"):
        Path(f"{store.path}{end}").replace(f"{elsewhere}{end}" if end not in moved else f"{store.path}.gone")
    assert another_chat(store.path) == ""
    assert [text for _, text, _ in said(Store(elsewhere), session.id)] == ["before", "yes"]
    instead = Store(store.path)
    for rescued in store.path.parent.glob("mlxpaged-unsaved-*.json"):
        instead.take_in([from_json(record) for record in json.loads(rescued.read_text())])
    assert sorted(one.title for one in instead.sessions()) == ["from elsewhere", "from elsewhere", "open"]
    assert [text for _, text, _ in said(instead, session.id)] == ["before", "yes", "after", "still"]
    instead.close()


def test_turns_that_the_closed_file_does_not_hold_are_found_by_reading_it_anew(store: Store) -> None:
    assert store.path
    session = store.create(title="open")
    exchange(store, session.id, "before", "yes")
    other = sqlite3.connect(store.path)
    with other:
        other.execute("DELETE FROM message WHERE content = 'yes'")
    other.close()
    assert words(store.close())["open"] == ["before", "yes"]
    assert store.problem == f"{store.path} no longer holds what was written to it"


def test_a_file_that_shrinks_because_it_is_tidied_up_is_still_the_same(store: Store) -> None:
    assert store.path
    large = store.create(title="large")
    exchange(store, large.id, "x" * 200_000, "yes")
    settled(store)
    session = store.create()
    exchange(store, session.id, "before", "yes")
    store.remove(large.id)
    tidy = sqlite3.connect(store.path)
    tidy.execute("VACUUM")
    tidy.close()
    settled(store)
    exchange(store, session.id, "after", "yes")
    assert store.problem is None and store.close() is None
    assert len(Store(store.path).messages(session.id)) == 4


def test_a_file_moved_and_moved_back_is_still_the_same(store: Store) -> None:
    assert store.path
    session = store.create()
    exchange(store, session.id, "before", "yes")
    move(store.path)
    Path(f"{store.path}.old").rename(store.path)
    exchange(store, session.id, "after", "yes")
    assert store.problem is None and store.close() is None
