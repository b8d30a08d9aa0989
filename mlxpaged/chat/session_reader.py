"""Saved conversations as they are read: listed, found by name, turn by turn, searched, written out. Sees the open ones
as they are in memory and the others as they are in the file; changes nothing."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

from ..errors import NoSession
from .session_rows import LISTED, message_from, session_from
from .session_tables import SessionTables
from .sessions import Message, Session, as_json, as_markdown


class SessionReader:
    """What there is in `tables`; every method may be called from any thread."""

    def __init__(self, tables: SessionTables) -> None:
        self._tables = tables
        self._lock = threading.RLock()

    @property
    def problem(self) -> str | None:
        """Why nothing is saved at the moment, or something cannot be read, in one line; None while all is well."""
        return self._tables.problem

    def sessions(self) -> list[Session]:
        """Every session, the last used first."""
        with self._lock:
            found = {row["id"]: row for row in self._tables.read(f"{LISTED} WHERE s.head IS NOT NULL")}
            for row in self._tables.open.execute(f"{LISTED} WHERE s.head IS NOT NULL"):
                found[row["id"]] = row
            ordered = sorted(found.values(), key=lambda row: (row["updated"], row["id"]), reverse=True)
            return [session_from(row, self._tables.me) for row in ordered]

    def session(self, session_id: str) -> Session:
        """One session by its whole id. Raises NoSession."""
        with self._lock:
            query, wanted = f"{LISTED} WHERE s.id = ?", (session_id,)
            row = self._tables.open.execute(query, wanted).fetchone()
            row = row or next(iter(self._tables.read(query, wanted)), None)
            if row is None:
                raise NoSession(f"there is no session {session_id}; `mlxpaged sessions list` shows them")
            return session_from(row, self._tables.me)

    def find(self, wanted: str) -> Session:
        """One session by id, start of the id, title, or start of the title. Raises NoSession: none, or several."""
        every, name = self.sessions(), wanted.casefold()
        for fits in (
            lambda one: one.id.casefold() == name or one.title.casefold() == name,
            lambda one: one.id.casefold().startswith(name) or one.title.casefold().startswith(name),
            lambda one: one.id.casefold().endswith(name),
        ):
            found = [one for one in every if fits(one)]
            if len(found) == 1:
                return found[0]
            if found:
                named = ", ".join(f"{one.id[-8:].lower()} ({one.title})" for one in found[:3])
                raise NoSession(f"{len(found)} sessions are called {wanted!r}: {named}; give the id of one")
        raise NoSession(f"there is no session {wanted!r}; `mlxpaged sessions list` shows them")

    def latest(self) -> Session | None:
        """The session used last that no other process has open."""
        return next((one for one in self.sessions() if not one.busy), None)

    def messages(self, session_id: str) -> list[Message]:
        """The conversation, first turn first: from the session's head back to its start. Turns that a retry or an
        edit left behind are not among them."""
        with self._lock:
            session = self.session(session_id)
            query, wanted = "SELECT * FROM message WHERE session = ?", (session_id,)
            rows = self._tables.open.execute(query, wanted).fetchall() or self._tables.read(query, wanted)
            by_id = {row["id"]: message_from(row) for row in rows}
            path: list[Message] = []
            at = session.head
            while at in by_id and len(path) < len(by_id):
                path.append(by_id[at])
                at = path[-1].parent
            mine = session_id in self._tables.mine()
            return [self._as_found(one, session.busy or mine) for one in reversed(path)]

    def search(self, text: str) -> list[tuple[Session, Message]]:
        """The last turn with `text` in it, of every session that has one; case does not matter."""
        with self._lock:
            query = "SELECT * FROM message WHERE holds(content, ?) ORDER BY id"
            wanted = (text.casefold(),)
            hits = {row["session"]: message_from(row) for row in self._tables.read(query, wanted)}
            hits |= {row["session"]: message_from(row) for row in self._tables.open.execute(query, wanted)}
            return [(one, hits[one.id]) for one in self.sessions() if one.id in hits]

    def export(self, session_id: str, kind: str = "md") -> str:
        """The session as markdown ("md") or as one JSON object ("json")."""
        session, messages = self.session(session_id), self.messages(session_id)
        if kind == "json":
            return json.dumps(as_json(session, messages), ensure_ascii=False, indent=2) + "\n"
        return as_markdown(session, messages)

    def _as_found(self, message: Message, live: bool) -> Message:
        return message if live or message.state != "streaming" else replace(message, state="interrupted")
