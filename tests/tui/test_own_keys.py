"""The app with a person's own keys: they act, the others do not, and every word about keys tells those in force."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.binding import Binding

from mlxpaged.tui.app import TuiApp
from mlxpaged.tui.chat_screen import ChatScreen
from mlxpaged.tui.dialogs import Help
from mlxpaged.tui.keys import ACTIONS
from mlxpaged.tui.prompt import Prompt
from mlxpaged.tui.transcript import Transcript
from tests.scripted import ScriptedService, says
from tests.tui.rig import Rig, run, running

OWN = {
    "new_session": "ctrl+t",
    "search": "f3",
    "help": "f5",
    "send": "ctrl+s",
    "new_line": "enter",
    "close_session": "f8",
    "leave": "f10",
    "commands": "f6",
    "retry": "alt+f",
    "turn_fork": "x",
}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPAGED_STATE", str(tmp_path))


def service() -> ScriptedService:
    return ScriptedService(lambda *_: says("ok"))


async def finished(rig: Rig) -> None:
    await rig.until(lambda: rig.talk.turns and not rig.talk.phase.is_live)
    await rig.drawn()


def test_every_action_of_the_table_is_bound_by_its_name() -> None:
    bound = [one for owner in (TuiApp, ChatScreen, Prompt, Transcript, Help) for one in owner.BINDINGS]
    assert {one.id for one in bound if isinstance(one, Binding)} - {None} == set(ACTIONS)


def test_own_keys_act_and_those_they_replace_do_not() -> None:
    async def test() -> None:
        async with running(service(), keys=OWN, size=(140, 50)) as rig:
            await rig.press("ctrl+n")
            assert len(rig.chat.talks) == 1
            await rig.press("ctrl+t")
            assert len(rig.chat.talks) == 2
            await rig.type("one")
            await rig.press("enter", "f8")
            assert rig.chat.prompt.text == "one\n" and not rig.service.submitted  # F8 closes nothing that is written
            await rig.press("ctrl+s")
            await finished(rig)
            await rig.press("ctrl+up", "f")
            assert len(rig.chat.talks) == 2
            await rig.press("x")
            await rig.until(lambda: len(rig.chat.talks) == 3)
            await rig.press("escape", "f8")
            await rig.until(lambda: len(rig.chat.talks) == 2)
            await rig.press("ctrl+f")
            assert rig.app.screen is rig.chat
            await rig.press("ctrl+q")
            assert rig.app.return_code is None
            await rig.pilot.press("f10")
            await rig.until(lambda: rig.app.return_code == 0)

    run(test)


def test_a_word_is_deleted_in_the_prompt_and_a_session_closed_where_it_is_empty() -> None:
    async def test() -> None:
        async with running(service()) as rig:
            await rig.press("ctrl+n")
            await rig.type("two words")
            await rig.press("ctrl+w")
            assert rig.chat.prompt.text == "two " and len(rig.chat.talks) == 2
            await rig.press("ctrl+c", "ctrl+w")
            await rig.until(lambda: len(rig.chat.talks) == 1)

    run(test)


def test_help_footer_palette_and_hints_tell_the_keys_in_force() -> None:
    async def test() -> None:
        async with running(service(), keys=OWN, size=(140, 60)) as rig:
            text = rig.text()
            assert "press Ctrl+S" in text and "Ctrl+T opens another" in text and "F5 keys   F6 commands" in text
            assert "^t new" in text and "f3 search" in text and "^n" not in text
            await rig.type("/ne")
            await rig.drawn()
            assert "Ctrl+T" in rig.text()
            rig.app.clear_notifications()
            await rig.press("ctrl+c", "f5")
            text = " ".join(rig.text().replace("│", " ").split())
            assert "Ctrl+T new session" in text and "F3 search in all sessions" in text
            assert "Ctrl+S send Enter new line" in text and "x a new session with the turns up to this one" in text
            assert "open or close thinking" not in text  # it has no key now
            await rig.press("f5")
            assert rig.app.screen is rig.chat
            await rig.press("f6")
            await rig.until(lambda: "open a new session · Ctrl+T" in rig.text())

    run(test)


def test_what_is_wrong_in_the_table_is_told_and_the_rest_holds() -> None:
    async def test() -> None:
        keys = {"new_sesion": "ctrl+t", "search": "hyperspace", "engine": "f4", "sessions": "f4"}
        async with running(service(), keys=keys, size=(140, 60)) as rig:
            text = " ".join(rig.text().replace("│", " ").split())
            assert "there is no action new_sesion" in text
            assert "F4 cannot be sessions too" in text
            assert "hyperspace" in text
            await rig.press("ctrl+f")
            assert rig.app.screen is not rig.chat
            await rig.press("escape", "ctrl+b", "ctrl+n")
            assert len(rig.chat.talks) == 2

    run(test)


def test_a_key_taken_from_an_action_of_the_footer_leaves_no_trace_there() -> None:
    async def test() -> None:
        async with running(service(), keys={"editor": "ctrl+f"}, size=(140, 40)) as rig:
            footer = rig.text().splitlines()[-1]
            assert "search" not in footer and "no_key" not in footer and "^n new" in footer

    run(test)
