"""What is half written for each session, kept on disk so that a killed app or a closed terminal loses no more than its
last second. Owns one small file for each such session; knows no widget and holds no text that is on disk.

Nothing here stops anyone: where the folder cannot be written or a file cannot be read, there is no draft.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from ..chat.sessions import is_alive, owner_name

SAVE_S = 1.0
"""Least time between two writings of a text that grows; one that was sent or emptied is removed at once."""


class Drafts:
    """The drafts of `folder`; None: nothing touches the disk. Coroutines and `keep` belong to the loop's thread."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._me = owner_name()
        self._waiting: dict[str, tuple[str, bool]] = {}
        self._writer: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._pause_s = SAVE_S

    @classmethod
    def beside(cls, sessions: Path | None) -> Drafts:
        """The drafts of the sessions in that file; None: of sessions that are not kept."""
        return cls(sessions and sessions.with_name("drafts"))

    def drop(self, session_id: str) -> None:
        """Removes the draft of a session that was deleted, at once."""
        if self._folder:
            self._write({session_id: ("", False)})

    def keep(self, session_id: str, text: str, new: bool = False) -> None:
        """What is written for a session now, "" for nothing; cheap, and called for every key. `new`: the store does not
        know the session, so its draft is all there is of it."""
        if self._folder is None:
            return
        self._waiting[session_id] = (text, new)
        if not text:
            self._hurry.set()
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_now_and_then())

    async def texts(self) -> dict[str, str]:
        """What was being written for each session, by its id."""
        return await asyncio.to_thread(self._texts) if self._folder else {}

    async def of(self, session_id: str) -> str:
        """What was being written for a session when it was last left."""
        return await asyncio.to_thread(self._read, session_id) if self._folder else ""

    async def left_behind(self, known: Container[str]) -> list[tuple[str, str]]:
        """(session id, text) of new sessions whose process ended, the newest last; they stay until `keep` of that id
        removes them. Drafts of sessions that were deleted, neither new nor `known`, go."""
        return await asyncio.to_thread(self._left_behind, known) if self._folder else []

    async def close(self) -> None:
        """Writes what waits."""
        self._pause_s = 0.0
        self._hurry.set()
        if self._writer:
            await self._writer

    async def _write_now_and_then(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            self._hurry.clear()
            await asyncio.to_thread(self._write, waiting)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), self._pause_s)

    def _write(self, waiting: dict[str, tuple[str, bool]]) -> None:
        for session_id, (text, new) in waiting.items():
            with suppress(OSError, ValueError):
                file = self._file(session_id)
                if not text:
                    file.unlink(missing_ok=True)
                    continue
                file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                fresh = file.with_suffix(".new")
                with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
                    json.dump({"text": text, "owner": self._me if new else None}, out)
                fresh.replace(file)

    def _left_behind(self, known: Container[str]) -> list[tuple[str, str]]:
        found = []
        assert self._folder
        for file in self._folder.glob("*.json"):
            session_id = unquote(file.stem)
            if session_id in known:
                continue
            with suppress(OSError, ValueError, LookupError, TypeError):
                draft = json.loads(file.read_bytes())
                if draft["owner"] is None:
                    file.unlink()
                elif not is_alive(draft["owner"]):
                    found.append((file.stat().st_mtime_ns, session_id, str(draft["text"])))
        return [(session_id, text) for _, session_id, text in sorted(found)]

    def _texts(self) -> dict[str, str]:
        assert self._folder
        ids = [unquote(file.stem) for file in self._folder.glob("*.json")]
        return {one: text for one in ids if (text := self._read(one))}

    def _read(self, session_id: str) -> str:
        with suppress(OSError, ValueError, LookupError, TypeError):
            return str(json.loads(self._file(session_id).read_bytes())["text"])
        return ""

    def _file(self, session_id: str) -> Path:
        """An id may come from an imported file, so it is no path until it is quoted."""
        assert self._folder
        return self._folder / f"{quote(session_id, safe='')}.json"
