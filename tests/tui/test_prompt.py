"""Keys that arrive together, as they do while the screen is drawn or a line is slow, work in the order of typing."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import events

from tests.scripted import ScriptedService
from tests.tui.rig import run, running


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPAGED_STATE", str(tmp_path))


@pytest.mark.parametrize(
    ("keys", "sent"),
    [
        (["ctrl+u", *"hello", "enter"], "hello"),
        ([*"!", "backspace", "backspace", *"d!", "enter"], "a first word!"),
        (["home", *"now ", "end", *".", "enter"], "now a first word."),
        (["left", "left", "delete", *"n", "ctrl+e", *"s", "enter"], "a first wonds"),
        (["ctrl+w", *"line", "ctrl+j", *"two", "up", "end", *":", "enter"], "a first line:\ntwo"),
    ],
)
def test_keys_of_one_burst_keep_their_order(keys: list[str], sent: str) -> None:
    async def test() -> None:
        async with running(ScriptedService(manual=True)) as rig:
            rig.chat.prompt.put("a first word")
            for key in keys:
                rig.app.post_message(events.Key(key, key if len(key) == 1 else None))
            await rig.until(lambda: rig.service.submitted)
            assert rig.talk.turns and rig.talk.turns[0].text == sent

    run(test)
