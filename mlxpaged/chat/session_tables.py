"""Memory first, then the file. Owns the rows of the sessions that are open here, what of them still waits to be
written and what is wrong with the file; knows nothing of what a conversation is.

What cannot be written waits and is tried again with the next write, what cannot be read is None; `problem` says why.
A file that is no longer the one that was opened is `lost`: from then on everything lives in memory, the sessions that
were open here before too. Only `take` raises for the file's sake. A lock belongs to the store, which holds it around
every call.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ..errors import NoSession, SessionBusy, UnreadableSession
from .session_file import BUSY_MS, SessionFileError, in_words, memory, open_file
from .session_rows import MESSAGE, SESSION, insert, update
from .session_watch import FileWatch, abandon
from .sessions import owner_name

_RETRY_S = 5.0


class SessionTables:
    """The tables of `path`, the open sessions' part of them in memory; `path` None: in memory only. `ticks` gives the
    seconds between attempts."""

    def __init__(self, path: Path | None, ticks: Callable[[], float]) -> None:
        self.path = path
        self.problem: str | None = None
        """Why nothing is saved at the moment, in one line; None while all is well."""
        self.me = owner_name()
        self.open = memory()
        self.file: sqlite3.Connection | None = None
        self.lost = False
        """Whether the file was taken away under this process, so that nothing is written any more."""
        self._ticks = ticks
        self._watch: FileWatch | None = None
        self._left: dict[str, tuple[tuple[Any, ...], list[tuple[Any, ...]]]] = {}  # sessions that were open here
        self._drafts: set[str] = set()  # sessions without a message: not worth keeping yet
        self._unsaved: dict[tuple[str, ...], tuple[str, tuple[Any, ...]]] = {}
        self._retry_at = 0.0
        self._connect()

    @property
    def unsaved(self) -> bool:
        """Whether something is in memory that belongs on disk."""
        return bool(self._unsaved) or (self.lost and bool(self._kept()))

    # -- which sessions are open here --------------------------------------------------------------------------

    def mine(self) -> list[str]:
        """The ids of the sessions open here."""
        return [row["id"] for row in self.open.execute("SELECT id FROM session")]

    def unsaved_sessions(self) -> list[str]:
        """Those of them with something that belongs on disk."""
        touched = {key[1] for key in self._unsaved}
        return [one for one in self._kept() if self.lost or one in touched]

    def _kept(self) -> list[str]:
        return [one for one in self.mine() if one not in self._drafts]

    def is_draft(self, session_id: str) -> bool:
        """Whether a session has had no message yet, and so is not for the disk."""
        return session_id in self._drafts

    def begin(self, session_id: str, values: tuple[Any, ...]) -> None:
        """A new session, in memory until `keep`."""
        self.open.execute(insert("session", SESSION), values)
        self._drafts.add(session_id)
        self._left.pop(session_id, None)

    def keep(self, session_id: str) -> None:
        """A session that is to be written from now on, as it stands; nothing happens when it already is."""
        if session_id in self._drafts:
            self._drafts.discard(session_id)
            row = self.open.execute("SELECT * FROM session WHERE id = ?", (session_id,)).fetchone()
            self._unsaved["session", session_id] = (insert("session", SESSION), tuple(row[name] for name in SESSION))

    def forget(self, session_id: str) -> None:
        """Close a session here; what the file has of it stays."""
        if session_id not in self._drafts:
            self._left[session_id] = self._rows(session_id)
        self._drafts.discard(session_id)
        self.open.execute("DELETE FROM session WHERE id = ?", (session_id,))

    def _rows(self, session_id: str) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
        """A session and its turns as they are in memory."""
        session = self.open.execute("SELECT * FROM session WHERE id = ?", (session_id,)).fetchone()
        turns = self.open.execute("SELECT * FROM message WHERE session = ?", (session_id,)).fetchall()
        return tuple(session[name] for name in SESSION), [tuple(one[name] for name in MESSAGE) for one in turns]

    def _keep_rows(self, session: tuple[Any, ...], turns: list[tuple[Any, ...]]) -> None:
        self.open.execute(insert("session", SESSION), session)
        self.open.executemany(insert("message", MESSAGE), turns)

    def take(self, session_id: str) -> None:
        """Session and turns into memory, and our name on it; a race for it is lost by SessionBusy or NoSession. Raises
        UnreadableSession."""
        found = self.read("SELECT * FROM session WHERE id = ?", (session_id,))
        turns = self.read("SELECT * FROM message WHERE session = ?", (session_id,))
        if found is None or turns is None:
            raise self.unreadable(session_id)
        if not found:
            raise NoSession(f"the session {session_id} was just removed by another mlxpaged")
        (session,) = found
        changed = self._file_changed(
            "UPDATE session SET owner = ? WHERE id = ? AND owner IS ?", (self.me, session_id, session["owner"])
        )
        if changed == 0:
            raise SessionBusy(f"the session {session['title'] or session_id!r} was just opened in another mlxpaged")
        self._keep_rows(
            tuple(session[name] for name in SESSION), [tuple(turn[name] for name in MESSAGE) for turn in turns]
        )
        self.open.execute(*update("owner", self.me, session_id))
        self._left.pop(session_id, None)

    # -- writing and reading -----------------------------------------------------------------------------------

    def queue(self, key: tuple[str, ...], statement: str, values: tuple[Any, ...]) -> None:
        """Done in memory now, and in the file by the next flush; the same key again replaces what waits. The second
        part of a key is the session's id."""
        self.open.execute(statement, values)
        if key[0] == "remove":
            self._left.pop(key[1], None)
        if key[1] not in self._drafts:
            self._unsaved[key] = (statement, values)

    def flush(self, now: bool = False) -> None:
        """Write what waits, in one transaction; not while an attempt failed a moment ago, unless `now`."""
        if self.path is None:
            self._unsaved.clear()
        if self.lost or not self._unsaved or (self._ticks() < self._retry_at and not now):
            return
        if self.file is None:
            self._connect()
        if self.file is None or self._is_gone():
            return
        try:
            self.file.execute("BEGIN IMMEDIATE")
            for statement, values in self._unsaved.values():
                self.file.execute(statement, values)
            self.file.execute("COMMIT")
            if not self._is_gone():
                self._unsaved.clear()
                self.problem = None
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                self.file.rollback()
            self._failed(error)

    def read(self, query: str, values: tuple[Any, ...] = ()) -> list[sqlite3.Row] | None:
        """Rows of the file; None where it cannot be read, which `problem` tells."""
        if self.file is None:
            return [] if self.path is None else None
        try:
            return self.file.execute(query, values).fetchall()
        except sqlite3.Error as error:
            self._failed(error)
            return None

    def unreadable(self, name: str) -> UnreadableSession:
        """What to raise after a `read` of this session that gave None."""
        return UnreadableSession(f"the session {name!r} cannot be read: {self.problem}")

    def close_file(self) -> None:
        """Let go of the file, then read it anew: one that does not hold what was written here is `lost`."""
        file, self.file = self.file, None
        if file is None or self.lost:
            return
        with suppress(sqlite3.Error):
            file.close()
        if self._watch:
            self._watch.close()
        if not self._unsaved and (missing := self._missing()):
            self._lose(missing)

    def close(self) -> None:
        """Let go of memory and file."""
        self.close_file()
        self.open.close()

    def _missing(self) -> str | None:
        """Why the closed file does not hold the sessions open here, in one line; None: it does."""
        assert self.path
        if not (ids := self._kept()):
            return None
        try:
            with closing(sqlite3.connect(f"{self.path.as_uri()}?mode=rw", timeout=BUSY_MS / 1000, uri=True)) as fresh:
                query = "SELECT id, content, reasoning FROM message WHERE session = ?"
                found = all(
                    {tuple(row) for row in self.open.execute(query, (one,))} <= set(fresh.execute(query, (one,)))
                    for one in ids
                )
        except sqlite3.Error as error:
            return in_words(error, self.path)
        return None if found else f"{self.path} no longer holds what was written to it"

    def _is_gone(self) -> bool:
        """Whether the file is no longer the one that was opened, looked up now."""
        if self._watch and (changed := self._watch.changed()):
            self._lose(changed)
        return self.lost

    def _lose(self, problem: str) -> None:
        """Go on in memory, with every session that was open here."""
        self.lost, self.problem = True, problem
        if self.file:
            abandon(self.file)
            self.file = None
        for session, turns in self._left.values():
            self._keep_rows(session, turns)
        self._left.clear()

    def _file_changed(self, statement: str, values: tuple[Any, ...]) -> int | None:
        """Rows changed at once; None when the file cannot be written, which `problem` tells."""
        try:
            return self.file.execute(statement, values).rowcount if self.file else None
        except sqlite3.Error as error:
            self._failed(error)
            return None

    def _connect(self) -> None:
        if self.path is None:
            return
        try:
            self.file = open_file(self.path)
            self._watch = FileWatch(self.path)
        except (SessionFileError, OSError) as error:
            self.problem = in_words(error, self.path) if isinstance(error, OSError) else str(error)
            self._retry_at = self._ticks() + _RETRY_S

    def _failed(self, error: sqlite3.Error) -> None:
        assert self.path
        if self._is_gone():
            return
        self.problem = in_words(error, self.path)
        self._retry_at = self._ticks() + _RETRY_S
