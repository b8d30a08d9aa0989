"""The list of sessions: how much of a title there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len

from mlxpaged.chat.store import Store
from mlxpaged.tui.sidebar import Sidebar
from tests.scripted import ScriptedService
from tests.tui.rig import run, running

TITLES = {
    "words": "The years between the wars, told in letters by those who were there",
    "CJK": "日本語のとても長いタイトルがここにありますので切ります、どこかで",
    "emoji": "🎉🚀" * 15,
}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPAGED_STATE", str(tmp_path))


@pytest.mark.parametrize("kind", TITLES)
@pytest.mark.parametrize(("columns", "room"), [(80, 22), (120, 26), (200, 36)])
def test_a_title_takes_the_room_there_is(kind: str, columns: int, room: int) -> None:
    async def test() -> None:
        store = Store(None)
        store.ask(store.create(title=TITLES[kind]).id, "x")
        async with running(ScriptedService(manual=True), size=(columns, 30), store=store) as rig:
            rig.chat.query_one(Sidebar).display = True
            await rig.drawn()
            line = next(line for line in rig.text().splitlines() if TITLES[kind][:4] in line)
            assert "…" in line
            shown = line.partition("▎")[2].partition("…")[0].rstrip()
            assert TITLES[kind].startswith(shown)
            assert room - 2 <= cell_len(shown) + len("…") <= room  # a wide sign may not fit into the last cell

    run(test)
