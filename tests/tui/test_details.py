"""The pane of the engine in a terminal that cannot hold all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpaged.tui.details import Details
from tests.scripted import ScriptedService
from tests.tui.rig import run, running


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPAGED_STATE", str(tmp_path))


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
def test_the_picture_of_the_pool_fills_its_lines_beside_a_scrollbar_too(size: tuple[int, int]) -> None:
    async def test() -> None:
        async with running(ScriptedService(manual=True), size=size) as rig:
            if size[0] < 150:
                await rig.press("f2")
            await rig.until(lambda: "KV POOL  0 of 64 blocks" in rig.text())
            details = rig.chat.query_one(Details)
            assert details.show_vertical_scrollbar is (size[1] == 24)
            lines = [line[details.content_region.x :].split(" ")[0] for line in rig.text().splitlines()]
            assert [line for line in lines if line.startswith("·")] == ["·" * 36, "·" * 28]

    run(test)
