"""Several models at once: a session for each, and each answered by its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpaged.chat.store import Store
from mlxpaged.tui.details import Details
from mlxpaged.tui.state import Phase
from tests.scripted import ScriptedService, says
from tests.tui.rig import Doors, Rig, run, running


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPAGED_STATE", str(tmp_path))


def model(name: str) -> ScriptedService:
    return ScriptedService(lambda *_: says(f"I am {name}."), name=name)


def three() -> tuple[ScriptedService, Doors]:
    """Engines of maker/small and maker/large; a third model is missing."""
    small = model("maker/small")
    doors = Doors(small)
    doors.others = {"maker/large": model("maker/large")}
    doors.missing = {"maker/none"}
    return small, doors


NAMES = ["maker/small", "maker/large", "maker/none"]


async def said(rig: Rig, text: str) -> str:
    """What the session on the screen answers."""
    before = len(rig.talk.turns or [])
    await rig.type(text)
    await rig.pilot.press("enter")
    await rig.until(lambda: len(rig.talk.turns or []) == before + 2 and not rig.talk.phase.is_live)
    await rig.drawn()
    assert rig.talk.turns
    return rig.talk.turns[-1].text


def test_a_session_is_opened_for_each_model_and_answered_by_it() -> None:
    async def test() -> None:
        service, doors = three()
        async with running(service, doors=doors, models=NAMES[:2], size=(160, 45)) as rig:
            assert [talk.model for talk in rig.chat.talks] == NAMES[:2]
            assert "new · small" in rig.text() and "new · large" in rig.text()
            assert await said(rig, "who?") == "I am maker/small."
            await rig.press("alt+2")
            assert "maker/large" in rig.text().splitlines()[0]
            assert await said(rig, "and you?") == "I am maker/large."
            await rig.press("ctrl+n")  # answered as the one on the screen is
            assert rig.talk.model == "maker/large" and rig.chat.query_one(Details).display
            assert await said(rig, "again?") == "I am maker/large."

    run(test)


def test_a_missing_model_is_told_at_once_and_the_others_answer() -> None:
    async def test() -> None:
        service, doors = three()
        async with running(service, doors=doors, models=NAMES, size=(160, 45)) as rig:
            await rig.until(
                lambda: "maker/none is not there" in rig.text() and "no model at 'maker/none'" in rig.text()
            )
            assert "!" not in rig.text().splitlines()[0]
            assert await said(rig, "who?") == "I am maker/small."
            await rig.press("alt+3")
            assert "! no model at 'maker/none'" in rig.text().splitlines()[0]
            await said(rig, "anybody?")
            assert rig.talk.phase is Phase.ERROR and "! no model at 'maker/none'" in rig.text()

    run(test)


def test_the_first_one_missing_costs_only_its_own_session() -> None:
    async def test() -> None:
        service, doors = three()
        async with running(service, doors=doors, models=["maker/none", "maker/large"]) as rig:
            assert "! no model at 'maker/none'" in rig.text()
            await rig.press("alt+2")
            assert await said(rig, "who?") == "I am maker/large."

    run(test)


def test_a_saved_session_keeps_its_model_where_that_is_one_of_those_named() -> None:
    async def test() -> None:
        store = Store(None)
        for title, name in (("mine", "maker/large"), ("old", "maker/gone")):
            session = store.create(name, title=title)
            store.ask(session.id, "before")
            store.reply(session.id).finish("done")
        service, doors = three()
        async with running(service, doors=doors, models=NAMES[:2], store=store, session="mine") as rig:
            assert len(rig.chat.talks) == 3  # it stands for the first model's
            assert await said(rig, "who?") == "I am maker/large."
            old = next(talk for talk in rig.chat.talks if talk.title == "old")
            await rig.chat.show_session(old.id)
            assert await said(rig, "who?") == "I am maker/small."

    run(test)
