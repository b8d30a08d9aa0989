"""Notices and dialogs: the one never lies over the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripted import ScriptedService
from tests.tui.rig import Rig, run, running


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPAGED_STATE", str(tmp_path))


def box(rig: Rig) -> list[str]:
    """The lines of the dialog alone."""
    region = rig.app.screen.query_one(".dialog, CommandList").region
    return [line[region.x : region.right].rstrip() for line in rig.text().splitlines()[region.y : region.bottom]]


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
@pytest.mark.parametrize(("key", "shown"), [("f1", "Keys and commands"), ("ctrl+p", "open a new session")])
def test_a_dialog_is_never_covered_and_what_came_meanwhile_is_told_after_it(
    size: tuple[int, int], key: str, shown: str
) -> None:
    async def test() -> None:
        async with running(ScriptedService(manual=True), size=size) as rig:
            await rig.pilot.press(key)
            await rig.until(lambda: shown in rig.text())
            alone = box(rig)
            await rig.pilot.press("escape")
            rig.chat.tell("shown before\nand long\nand longer", severe=True)
            await rig.until(lambda: "shown before" in rig.text())
            await rig.pilot.press(key)
            await rig.until(lambda: shown in rig.text())
            rig.chat.tell("told while it is open\nand long\nand longer")
            await rig.drawn()
            await rig.until(lambda: box(rig) == alone)
            assert shown in "".join(alone)
            assert "told while" not in rig.text()
            await rig.pilot.press("escape")
            await rig.until(lambda: "told while it is open" in rig.text())

    run(test)


def test_a_notice_waits_for_the_dialog_that_follows_another_too() -> None:
    async def test() -> None:
        async with running(ScriptedService(manual=True)) as rig:
            await rig.pilot.press("ctrl+p")
            await rig.until(lambda: "Search for commands" in rig.text())
            rig.app.notify("the server went away")
            await rig.pilot.press(*"rename", "down", "enter")
            await rig.until(lambda: "Rename the session" in rig.text())
            await rig.drawn()
            assert "went away" not in rig.toasts()
            await rig.pilot.press("escape")
            await rig.until(lambda: "the server went away" in rig.text())

    run(test)


@pytest.mark.parametrize("size", [(40, 10), (120, 40)])
def test_a_question_that_deletes_shows_its_answers(size: tuple[int, int]) -> None:
    async def test() -> None:
        async with running(ScriptedService(manual=True), size=size) as rig:
            await rig.chat.tracker.rename(rig.talk.id, "a very long title " * 20)
            rig.chat.do_delete("")
            await rig.drawn()
            assert "good?" in rig.text() and "y: yes · Esc: no" in rig.text()

    run(test)
