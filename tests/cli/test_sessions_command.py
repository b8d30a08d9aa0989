"""`mlxpaged sessions`: what was said can be listed, read, found, written out, renamed and removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpaged.chat.sessions import State, short_id
from mlxpaged.chat.store import Store
from tests.cli.conftest import Program, Terminal

FOXES, KANJI = "foxes 🦊 in \x1b[31mred", "漢字 and kana"


@pytest.fixture
def store(environment: dict[str, str]) -> Store:
    """Two conversations, closed."""
    store = Store(Path(environment["MLXPAGED_DATA"]) / "sessions.db")
    for question, answer in (("Foxes 🦊 in \x1b[31mred", "They are quick."), ("漢字 and kana", "Two scripts.")):
        session = store.create("scripted")
        store.ask(session.id, question)
        draft = store.reply(session.id)
        draft.feed(answer)
        draft.finish("done")
        store.release(session.id)
    return store


def test_the_list_is_for_people_or_for_scripts(program: Program, store: Store) -> None:
    lines = program("sessions", "list").out.splitlines()
    assert lines[0].split() == ["ID", "USED", "TURNS", "TITLE"]
    assert [line.split(maxsplit=3)[3] for line in lines[1:]] == ["漢字 and kana", "Foxes 🦊 in ␛[31mred"]
    listed = json.loads(program("sessions", "list", "--json").out)
    assert [(one["title"], one["num_messages"], one["model"]) for one in listed] == [
        ("漢字 and kana", 2, "scripted"),
        ("Foxes 🦊 in \x1b[31mred", 2, "scripted"),
    ]


@pytest.mark.parametrize(("state", "mark"), [("error", "broken off"), ("interrupted", "interrupted"), ("stopped", "")])
def test_a_reply_that_broke_off_is_marked(program: Program, store: Store, state: State, mark: str) -> None:
    session = store.create("scripted")
    store.ask(session.id, "tell")
    draft = store.reply(session.id)
    draft.feed("Once upon")
    draft.finish(state, error="the server is gone" if state == "error" else None)
    store.close()
    assert program("sessions", "list").out.splitlines()[1].split("tell")[1].strip() == mark
    newest = json.loads(program("sessions", "list", "--json").out)[0]
    assert (newest["last_state"], newest["interrupted"]) == (state, state == "interrupted")


def test_nothing_saved_yet_is_said_and_makes_no_file(program: Program, environment: dict[str, str]) -> None:
    assert program("sessions", "list").out == "No saved conversations yet; `mlxpaged chat` begins one.\n"
    assert program("sessions", "list", "--json").out == "[]\n"
    assert not Path(environment["MLXPAGED_DATA"]).exists()
    assert program("sessions", "path").out == f"{environment['MLXPAGED_DATA']}/sessions.db\n"


def test_show_search_and_export(program: Program, store: Store, tmp_path: Path) -> None:
    assert "## Assistant\n\nTwo scripts." in program("sessions", "show", KANJI).out
    assert json.loads(program("sessions", "show", KANJI, "--json").out)["messages"][1]["content"] == "Two scripts."
    assert "They are quick." in program("sessions", "search", "QUICK").out
    assert [hit["content"] for hit in json.loads(program("sessions", "search", "scripts", "--json").out)] == [
        "Two scripts."
    ]
    assert program("sessions", "search", "nowhere").out == "Nothing with 'nowhere'.\n"
    target = tmp_path / "out.json"
    assert program("sessions", "export", FOXES, "--format", "json", "-o", str(target)).code == 0
    assert json.loads(target.read_text())["messages"][1]["content"] == "They are quick."
    again = program("sessions", "export", FOXES, "-o", str(target))
    assert (again.code, again.err) == (2, f"mlxpaged: {target} exists already; give --output another name\n")
    assert len(json.loads(program("sessions", "export", "--all").out)) == 2


def test_what_was_written_out_comes_back_as_it_was(program: Program, store: Store, tmp_path: Path) -> None:
    target = tmp_path / "all.json"
    assert program("sessions", "export", "--all", "-o", str(target)).code == 0
    again = program("sessions", "import", str(target))
    assert again.code == 2 and "all 2 conversations are here already" in again.err
    elsewhere = {"MLXPAGED_DATA": str(tmp_path / "elsewhere")}
    taken = program("sessions", "import", str(target), **elsewhere)
    assert (taken.code, taken.err) == (0, f"mlxpaged: 2 conversations taken in from {target}\n")
    assert json.loads(program("sessions", "export", "--all", **elsewhere).out) == json.loads(target.read_text())


def test_a_conversation_that_went_on_elsewhere_is_taken_in_beside_the_one_here(
    program: Program, store: Store, tmp_path: Path
) -> None:
    whole = json.loads(program("sessions", "export", FOXES, "--format", "json").out)
    whole["messages"][1]["content"] = "They are quick and red."
    (tmp_path / "longer.json").write_text(json.dumps([whole]))
    assert program("sessions", "import", "longer.json").code == 0
    assert len(json.loads(program("sessions", "list", "--json").out)) == 3
    assert "quick and red" in program("sessions", "search", "and red").out
    assert "They are quick." in program("sessions", "show", whole["id"]).out


def test_of_a_file_only_what_is_not_here_yet_is_taken_in(program: Program, store: Store, tmp_path: Path) -> None:
    assert program("sessions", "export", "--all", "-o", "all.json").code == 0
    assert program("sessions", "rm", FOXES).code == 0
    assert program("sessions", "import", "all.json").err == (
        "mlxpaged: 1 conversation taken in from all.json; 1 was here already\n"
    )
    assert len(json.loads(program("sessions", "list", "--json").out)) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "is not JSON"),
        ("[1]", "holds no conversation of mlxpaged"),
        ('{"format": "mlxpaged-session", "version": 9}', "is of version 9"),
        ('{"format": "mlxpaged-session", "version": 1, "id": 3, "messages": []}', "is damaged"),
        ('{"format": "mlxpaged-session", "version": 1, "id": "A"}', "is damaged"),
        ('{"format": "mlxpaged-session", "version": 1, "id": "A", "messages": []}', "has no turns"),
    ],
)
def test_another_file_is_not_taken_in(program: Program, tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "other.json").write_text(content)
    ended = program("sessions", "import", "other.json")
    assert ended.code == 2 and words in ended.err and ended.err.count("\n") == 1
    assert program("sessions", "import", "absent.json").err == (
        "mlxpaged: cannot read absent.json: No such file or directory\n"
    )


def test_rename_and_remove_tell_what_they_did(program: Program, store: Store) -> None:
    kanji, foxes = (short_id(one.id) for one in store.sessions())
    renamed = program("sessions", "rename", foxes, " Animals ")
    assert (renamed.code, renamed.err) == (0, f"mlxpaged: renamed 'Foxes 🦊 in \\x1b[31mred' ({foxes}) to 'Animals'\n")
    removed = program("sessions", "rm", kanji, KANJI)
    assert (removed.code, removed.err) == (0, f"mlxpaged: deleted '漢字 and kana' ({kanji}), 2 messages\n")
    assert [one["title"] for one in json.loads(program("sessions", "list", "--json").out)] == ["Animals"]
    missing = program("sessions", "rm", KANJI)
    assert (missing.code, missing.err) == (
        1,
        f"mlxpaged: there is no session {KANJI!r}; `mlxpaged sessions list` shows them\n",
    )
    unnamed = program("sessions", "rename", "animals", " ")
    assert unnamed.code == 2 and "a conversation needs a title" in unnamed.err


def test_what_is_listed_names_a_session_and_a_letter_of_it_none(program: Program, store: Store) -> None:
    kanji, foxes = store.sessions()
    assert short_id(kanji.id) in program("sessions", "list").out
    for unclear in (short_id(kanji.id)[0], kanji.id[:4], "漢", short_id(kanji.id)[-4:]):
        assert program("sessions", "rm", unclear).code == 1
    assert len(store.sessions()) == 2
    assert f"is it {short_id(kanji.id)} (漢字 and kana)?" in program("sessions", "rm", "漢").err
    assert program("sessions", "rm", short_id(kanji.id)[:4]).code == 0
    assert [one.id for one in store.sessions()] == [foxes.id]


def test_in_a_terminal_removing_is_asked_about(terminal: Callable[..., Terminal], store: Store) -> None:
    asked = terminal("sessions", "rm", KANJI, FOXES)
    assert "2 messages; 'Foxes" in asked.until("2 messages for good? [y/N]").replace("\n", "")
    asked.type("n\r")
    assert asked.ended() != 0 and len(store.sessions()) == 2
    asked = terminal("sessions", "rm", KANJI)
    asked.until("[y/N]")
    asked.type("y\r")
    asked.until("deleted '漢字 and kana'")
    assert asked.ended() == 0
    assert terminal("sessions", "rm", "-y", FOXES).ended() == 0
    assert store.sessions() == []


def test_what_is_half_written_goes_with_its_session(program: Program, store: Store) -> None:
    assert store.path
    drafts = [store.path.with_name("drafts") / f"{one.id}.json" for one in store.sessions()]
    drafts[0].parent.mkdir()
    for draft in drafts:
        draft.write_text('{"text": "half a thought", "owner": null}')
    assert program("sessions", "rm", KANJI).code == 0
    assert [draft.exists() for draft in drafts] == [False, True]


def test_search_finds_titles(program: Program, store: Store) -> None:
    (kanji, _) = store.sessions()
    store.rename(kanji.id, "The 🐉")
    assert "The 🐉  (in its title)" in program("sessions", "search", "🐉").out
    (hit,) = json.loads(program("sessions", "search", "🐉", "--json").out)
    assert hit["id"] == kanji.id and "message" not in hit


def test_a_file_without_a_conversation_is_told(program: Program, tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text("[]")
    ended = program("sessions", "import", "none.json")
    assert (ended.code, ended.err) == (1, "mlxpaged: none.json holds no conversation\n")


def test_a_session_in_use_is_not_removed(program: Program, store: Store) -> None:
    session = store.create()
    store.ask(session.id, "in use")
    ended = program("sessions", "rm", "in use")
    assert ended.code == 1 and "is open in another mlxpaged" in ended.err
    assert "open elsewhere" in program("sessions", "list").out


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda file: file.write_bytes(b"nonsense" * 1000), "is damaged"),
        (lambda file: (file.unlink(), file.mkdir()), "cannot be opened"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(
    program: Program, store: Store, spoil: Callable[[Path], object], words: str
) -> None:
    assert store.path
    store.close()
    spoil(store.path)
    ended = program("sessions", "list")
    assert ended.code == 1 and words in ended.err and ended.err.count("\n") == 1
