"""The app in windows of every size, down to one cell, whatever stands beside or over the conversation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpaged.chat.store import Store
from mlxpaged.tui.panes import ROOM_FROM
from tests.scripted import ScriptedService
from tests.tui.rig import Rig, run, running

ANSWER = """Some **bold** 漢字 🎉

```python
line = 'which is a long one, longer than most windows are wide'
```

| a | b |
|---|---|
| 1 | 👩‍👩‍👧 |
"""

PANES = {"none": (), "sidebar": ("sidebar",), "engine": ("details",), "both": ("sidebar", "details")}
DIALOGS: dict[str, Callable[[Rig], object]] = {
    "confirm": lambda rig: rig.chat.do_delete(""),
    "question": lambda rig: rig.chat.do_rename(""),
    "search": lambda rig: rig.chat.do_search("bold"),
    "help": lambda rig: rig.chat.do_help(""),
    "palette": lambda rig: rig.app.action_command_palette(),
}
EDGES = [(1, 1), (7, 12), (44, 10), (60, 15), (75, 1), (110, 40)]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPAGED_STATE", str(tmp_path))


def with_an_answer() -> Store:
    store = Store(None)
    session = store.create()
    store.ask(session.id, "An emoji 🎉 and a question")
    draft = store.reply(session.id, "scripted")
    draft.feed(ANSWER, "let me think")
    draft.finish("done")
    return store


async def drawn_at(rig: Rig, columns: int, rows: int) -> None:
    await rig.pilot.resize_terminal(columns, rows)
    assert rig.app._exception is None, f"{columns}x{rows}: {rig.app._exception!r}"
    assert rig.text().count("\n") == rows - 1


def want(rig: Rig, panes: tuple[str, ...]) -> None:
    rig.chat._panes._wanted = {"sidebar": False, "details": False}
    for pane in panes:
        rig.chat.toggle(pane)


def test_every_width_and_height_is_drawn() -> None:
    async def test() -> None:
        store = with_an_answer()
        async with running(ScriptedService(manual=True), store=store, session="An emoji 🎉 and a question") as rig:
            want(rig, PANES["both"])
            for columns in [*range(1, 76), 89, 90, 109, 110, 149, 150, 200]:
                await drawn_at(rig, columns, 1 + columns % 20)

    run(test)


@pytest.mark.parametrize("dialog", DIALOGS)
@pytest.mark.parametrize("panes", PANES)
def test_small_windows_show_every_dialog(panes: str, dialog: str) -> None:
    async def test() -> None:
        async with running(ScriptedService(manual=True), store=with_an_answer()) as rig:
            want(rig, PANES[panes])
            DIALOGS[dialog](rig)
            await rig.drawn()
            for columns, rows in EDGES:
                await drawn_at(rig, columns, rows)

    run(test)


@pytest.mark.parametrize(("key", "pane"), [("f2", "details"), ("ctrl+b", "sidebar")])
def test_a_pane_waits_for_room_and_says_so(key: str, pane: str) -> None:
    async def test() -> None:
        least = ROOM_FROM[pane]
        async with running(ScriptedService(manual=True), size=(least - 1, 20)) as rig:
            await rig.press(key)
            assert f"needs {least} columns; this window has {least - 1}" in rig.toasts()
            assert rig.chat.prompt.size.width > least // 2
            await rig.pilot.resize_terminal(least, 20)
            assert rig.chat._panes._widgets[pane].display

    run(test)
