"""Half-written messages outlive the app, and nothing else does."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mlxpaged.chat.store import Store
from mlxpaged.tui import drafts
from mlxpaged.tui.drafts import Drafts
from tests.scripted import ScriptedService, says
from tests.tui.rig import Rig, run, running

DEAD = "1:1:aaaa"
"""The owner of what a killed app left: no process of that id began then."""


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPAGED_STATE", str(tmp_path / "state"))


def scripted() -> ScriptedService:
    return ScriptedService(lambda *_: says("ok"), manual=True)


def on_disk(folder: Path) -> dict[str, str]:
    """Session id -> its half-written text."""
    found = {}
    for file in (folder / "drafts").glob("*.json"):
        with suppress(FileNotFoundError):  # removed since
            found[file.stem] = json.loads(file.read_text())["text"]
    return found


def killed(folder: Path) -> None:
    """What is there becomes what a killed app would have left."""
    for file in (folder / "drafts").glob("*.json"):
        draft, when = json.loads(file.read_text()), file.stat()
        file.write_text(json.dumps(draft | {"owner": draft["owner"] and DEAD}))
        os.utime(file, ns=(when.st_atime_ns, when.st_mtime_ns))


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


async def finish(rig: Rig) -> None:
    while rig.service._rows:
        rig.service.step()
    await rig.until(lambda: not rig.talk.phase.is_live)


def test_a_half_written_message_is_there_when_its_session_is_opened_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(scripted(), store=Store(tmp_path / "sessions.db")) as rig:
            await rig.send("walruses")
            await rig.until(lambda: on_disk(tmp_path) == {})
            await finish(rig)
            await rig.type("half a thou")
            await rig.until(lambda: on_disk(tmp_path) == {rig.talk.id: "half a thou"})
            (file,) = (tmp_path / "drafts").iterdir()
            assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
        store = Store(tmp_path / "sessions.db")  # the first one was never closed
        async with running(scripted(), store=store) as rig:
            assert rig.chat.prompt.text == ""
            assert "open elsewhere · ✎" in rig.text()  # seen in the list before it is opened
            await rig.press("ctrl+pagedown")
            assert rig.chat.prompt.text == "half a thou"
            assert "✎" not in rig.text()
            await rig.press("ctrl+pageup")
            assert "open elsewhere · ✎" in rig.text()
        async with running(scripted(), store=store, session="walruses") as rig:
            assert rig.chat.prompt.text == "half a thou"
            await rig.press("ctrl+c")
            await rig.until(lambda: on_disk(tmp_path) == {})

    run(test)


def test_what_was_written_for_a_new_session_opens_a_new_session(tmp_path: Path) -> None:
    async def test() -> None:
        for text in ("first", "second"):
            async with running(scripted(), store=Store(tmp_path / "sessions.db")) as rig:
                await rig.type(text)
                await rig.until(lambda text=text: text in on_disk(tmp_path).values())
        assert sorted(on_disk(tmp_path).values()) == ["first", "second"]  # their process lives: nobody takes them
        killed(tmp_path)
        async with running(scripted(), store=Store(tmp_path / "sessions.db")) as rig:
            assert [talk.draft for talk in rig.chat.talks] == ["second", "first"]
            assert rig.chat.prompt.text == "second"
            await rig.until(lambda: set(on_disk(tmp_path)) == {talk.id for talk in rig.chat.talks})
            await rig.pilot.press("enter")
            await rig.until(lambda: rig.service.submitted)
            await rig.until(lambda: list(on_disk(tmp_path).values()) == ["first"])
            await finish(rig)

    run(test)


def test_a_pasted_chip_is_kept_as_what_it_stands_for(tmp_path: Path) -> None:
    async def test() -> None:
        pasted = "line\n" * 30
        async with running(scripted(), store=Store(tmp_path / "sessions.db")) as rig:
            rig.chat.prompt.insert_pasted(pasted)
            await rig.type(" what is it?")
            await rig.until(lambda: list(on_disk(tmp_path).values()) == [f"{pasted} what is it?"])
            await rig.press("ctrl+n", "ctrl+pagedown")
            assert rig.chat.prompt.text == "[pasted #1: 31 lines] what is it?"

    run(test)


def test_leaving_writes_the_last_keys_and_closing_or_deleting_forgets(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(scripted(), store=Store(tmp_path / "sessions.db")) as rig:
            await rig.send("walruses")
            await finish(rig)
            await rig.type("more of ")
            await rig.until(lambda: on_disk(tmp_path))
            rig.chat.prompt.insert("them")  # within a second of the last writing
            await rig.press("ctrl+n")
            await rig.type("something else")
            rig.chat.do_close("")  # by the palette
            await rig.until(lambda: len(rig.chat.talks) == 1)
            await rig.pilot.press("ctrl+q")
            await rig.until(lambda: rig.app.return_code == 0)
        assert list(on_disk(tmp_path).values()) == ["more of them"]
        store = Store(tmp_path / "sessions.db")
        async with running(scripted(), store=store, session="walruses") as rig:
            await rig.app.tracker.remove(rig.chat.chosen)
            await rig.until(lambda: on_disk(tmp_path) == {})

    run(test)


def test_an_ephemeral_app_writes_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPAGED_DATA", str(tmp_path / "data"))

    async def test() -> None:
        async with running(scripted(), store=Store(None)) as rig:
            await rig.type("a secret")
            await rig.pilot.press("ctrl+q")
            await rig.until(lambda: rig.app.return_code == 0)
        assert not [file for file in tmp_path.rglob("*") if file.is_file() and "secret" in file.read_text()]

    run(test)


def test_a_text_that_grows_is_written_seldom_and_one_that_was_sent_goes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    async def test() -> None:
        kept = Drafts(tmp_path / "drafts")
        write = kept._write
        monkeypatch.setattr(kept, "_write", lambda waiting: (written.extend(waiting.values()), write(waiting)))
        kept.keep("one", "a")
        await until(lambda: written)
        for text in ("ab", "abc"):
            kept.keep("one", text)
            await asyncio.sleep(0.01)
        assert written == [("a", False)] and drafts.SAVE_S >= 1
        kept.keep("one", "")
        await until(lambda: len(written) > 1)
        await kept.close()
        assert written == [("a", False), ("", False)] and on_disk(tmp_path) == {}

    run(test)


def test_a_folder_that_cannot_be_used_stops_nobody_and_an_id_is_no_path(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "drafts").write_text("in the way")
        kept = Drafts(tmp_path / "drafts")
        kept.keep("one", "text")
        await kept.close()
        assert await kept.of("one") == "" and await kept.left_behind(()) == []
        kept = Drafts(tmp_path / "inner" / "drafts")
        kept.keep("../../stray", "text")
        await kept.close()
        assert await kept.of("../../stray") == "text"
        assert [file.parent.name for file in tmp_path.rglob("*.json")] == ["drafts"]
        (tmp_path / "inner" / "drafts" / "torn.json").write_text('{"tex')
        assert await kept.of("torn") == ""
        await kept.left_behind(())  # that session is not there any more
        assert await kept.of("../../stray") == ""

    run(test)
