"""What is read of a damaged session file: every row whose own bytes are there, and how much is known to be missing."""

from __future__ import annotations

import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from mlxpaged.chat.salvage import Salvage, salvage
from mlxpaged.chat.sessions import from_json
from mlxpaged.chat.store import Store
from mlxpaged.errors import ConfigError
from tests.chat.test_store import exchange, said

PAGE = 4096
SESSIONS, TURNS = 60, 6


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Sixty conversations of six messages; every seventh has a message of several pages."""
    store = Store(tmp_path / "sessions.db")
    for number in range(SESSIONS):
        session = store.create("scripted", title=f"talk {number}", system="Be brief.", params={"temperature": 0.5})
        for turn in range(TURNS // 2):
            exchange(store, session.id, f"question {number} {turn} " + "ü" * (4000 if number % 7 == 0 else 150), "yes")
        store.release(session.id)
    store.close()
    assert store.path
    return store.path


def counts(found: Salvage) -> tuple[int, int, int, int]:
    return len(found.records), found.num_messages, found.lost_sessions, found.lost_messages


def spoiled(file: Path, start: int, end: int, with_what: bytes | None = None) -> Salvage:
    content = bytearray(file.read_bytes())
    content[start:end] = with_what or bytes(end - start)
    file.write_bytes(content)
    return salvage(file)


def test_a_sound_file_is_read_as_the_store_reads_it_and_stays_as_it_is(file: Path) -> None:
    before = file.read_bytes()
    found = salvage(file)
    assert counts(found) == (SESSIONS, SESSIONS * TURNS, 0, 0)
    store = Store(file)
    exported = {one.id: (one, store.messages(one.id)) for one in store.sessions()}
    store.close()
    for session, turns in map(from_json, found.records):
        kept, kept_turns = exported[session.id]
        assert (session.title, session.system, session.params, session.created, session.updated) == (
            *(kept.title, kept.system, kept.params, kept.created, kept.updated),
        )
        assert turns == kept_turns
    assert file.read_bytes() == before


def test_zeroed_pages_cost_their_own_rows_and_the_rest_is_counted(file: Path) -> None:
    middle = file.stat().st_size // PAGE // 2
    found = spoiled(file, (middle - 3) * PAGE, (middle + 3) * PAGE)
    saved, messages, lost_sessions, lost_messages = counts(found)
    assert 40 < saved < SESSIONS and 200 < messages < SESSIONS * TURNS
    assert (saved + lost_sessions, messages + lost_messages) == (SESSIONS, SESSIONS * TURNS)


def test_half_a_file_gives_what_its_pages_hold(file: Path) -> None:
    size = file.stat().st_size
    found = spoiled(file, size // 2, size, b"cut")
    saved, messages, lost_sessions, lost_messages = counts(found)
    assert saved > 15 and messages >= saved and lost_sessions and lost_messages
    assert saved + lost_sessions <= SESSIONS and messages + lost_messages <= SESSIONS * TURNS


@pytest.mark.parametrize("table", ["session", "message"])
def test_the_root_of_a_table_is_not_needed(file: Path, table: str) -> None:
    database = sqlite3.connect(file)
    (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    database.close()
    assert counts(spoiled(file, (root - 1) * PAGE, root * PAGE))[:2] == (SESSIONS, SESSIONS * TURNS)


def test_a_lost_header_costs_nothing(file: Path) -> None:
    assert counts(spoiled(file, 0, 100, b"no database".ljust(100))) == (SESSIONS, SESSIONS * TURNS, 0, 0)


def test_a_message_that_is_torn_out_leaves_the_conversation_before_and_after_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "sessions.db")
    session = store.create()
    for turn in range(3):
        exchange(store, session.id, f"question {turn}", f"answer {turn}")
    store.close()
    content = (tmp_path / "sessions.db").read_bytes()
    at = content.index(b"userquestion 1")  # the columns before: id, session, parent
    found = spoiled(tmp_path / "sessions.db", at - 30, at, b"\xff" * 30)
    ((_, turns),) = map(from_json, found.records)
    assert [one.content for one in turns] == ["question 0", "answer 0", "answer 1", "question 2", "answer 2"]
    assert counts(found) == (1, 5, 0, 1)


def test_messages_whose_session_is_lost_are_saved_under_their_first_words(tmp_path: Path) -> None:
    store = Store(tmp_path / "sessions.db")
    exchange(store, store.create("scripted", title="Foxes").id, "Are they quick?", "Yes.")
    store.close()
    database = sqlite3.connect(tmp_path / "sessions.db")
    (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'session'").fetchone()
    database.close()
    found = spoiled(tmp_path / "sessions.db", (root - 1) * PAGE, root * PAGE)
    ((session, turns),) = map(from_json, found.records)
    assert (session.title, session.model) == ("Are they quick?", "scripted")
    assert [one.content for one in turns] == ["Are they quick?", "Yes."]


def test_what_is_only_in_the_log_is_read_too(file: Path, tmp_path: Path) -> None:
    store = Store(file)
    session = store.create(title="fresh")
    exchange(store, session.id, "only in the log", "yes")
    copy = tmp_path / "copy" / "sessions.db"
    copy.parent.mkdir()
    for one in ("", "-wal"):
        shutil.copyfile(f"{file}{one}", f"{copy}{one}")
    store.close()
    assert counts(salvage(copy)) == (SESSIONS + 1, SESSIONS * TURNS + 2, 0, 0)
    assert any(record["title"] == "fresh" for record in salvage(copy).records)


def test_what_was_deleted_or_taken_back_does_not_come_back(file: Path) -> None:
    store = Store(file)
    for one in store.sessions()[:40]:
        store.remove(one.id)
    undone = store.create(title="undone")
    store.rewind(undone.id, store.ask(undone.id, "never mind").parent)
    retried = store.sessions()[0]
    head = store.messages(retried.id)[-1]
    store.rewind(retried.id, head.parent)
    store.reply(retried.id).finish("done")
    store.close()
    found = salvage(file)
    assert counts(found) == (20, 20 * TURNS, 0, 0)
    assert head.id not in str(found.records)


def test_a_rescue_goes_into_a_new_file(file: Path, tmp_path: Path) -> None:
    middle = file.stat().st_size // PAGE // 2
    found = spoiled(file, middle * PAGE, (middle + 2) * PAGE)
    store = Store(tmp_path / "new.db")
    assert store.take_in([from_json(record) for record in found.records]) == len(found.records)
    kept = store.sessions()
    assert sum(len(said(store, one.id)) for one in kept) == found.num_messages
    store.close()


@pytest.mark.parametrize("seed", range(10))
def test_noise_anywhere_is_no_error(file: Path, seed: int) -> None:
    source = random.Random(seed)
    content = bytearray(file.read_bytes())
    for _ in range(10 ** (seed % 5)):
        content[source.randrange(100, len(content))] = source.randrange(256)
    file.write_bytes(content)
    found = salvage(file)
    assert found.records and all(from_json(record) for record in found.records)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"no database at all " * 1000, "is no file of conversations"),
        (b"", "is no file of conversations"),
        (b"SQLite format 3\x00" + bytes(8000), "no conversation can be read from"),
        (random.Random(0).randbytes(100_000), "is no file of conversations"),
    ],
)
def test_a_file_without_conversations_is_told(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "sessions.db").write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        salvage(tmp_path / "sessions.db")
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.db: No such file"):
        salvage(tmp_path / "absent.db")
