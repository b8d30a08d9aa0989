"""An app that ends by a bug: what it says, and what is kept of what was going on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlxpaged.chat.store import Store
from mlxpaged.tui.app import TuiApp
from mlxpaged.tui.transcript import Transcript
from tests.scripted import ScriptedService, says
from tests.tui.rig import Doors, run


def test_a_bug_leaves_the_reply_interrupted_and_no_traceback_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLXPAGED_STATE", str(tmp_path))
    service = ScriptedService(lambda *_: says("half a reply", " and more"), manual=True)
    store = Store(tmp_path / "sessions.db")

    async def test() -> None:
        app = TuiApp(store, Doors(service))
        running = asyncio.create_task(app.run_async(headless=True, size=(80, 24)))
        while not (app._chat and app._chat.query(Transcript)):
            await asyncio.sleep(0.01)
        app._chat.attempt(app._chat._send("hello", None))
        while not service.submitted:
            await asyncio.sleep(0.01)
        service.step()
        while not app.tracker.talks[app._chat.chosen].num_tokens:
            await asyncio.sleep(0.01)
        app.call_later(lambda: 1 // 0)
        await running
        assert isinstance(app.broken, ZeroDivisionError)

    run(test)
    service.close()
    assert "Traceback" not in "".join(capfd.readouterr())
    with_reply = Store(tmp_path / "sessions.db")
    (session,) = with_reply.sessions()
    kept = [(one.content, one.state) for one in with_reply.messages(session.id)]
    with_reply.close()
    assert kept == [("hello", "done"), ("half a reply", "interrupted")]
