"""Saved conversations as they are read: listed, found by name, turn by turn, searched, written out. Sees the open ones
as they are in memory and the others as they are in the file; changes nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ..errors import NoSession, UnreadableSession
from .session_rows import HOLDING, LISTED, message_from, session_from
from .session_tables import SessionTables
from .sessions import Message, Session, as_json, as_markdown, short_id

_LEAST_ID = 4
"""Letters of an id that are taken for its start; fewer are a slip too often."""

_MOST_NAMED = 5


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
        """Every session, the last used first; only those open here where the file cannot be read."""
        return self._listed()[0]

    def _listed(self) -> tuple[list[Session], bool]:
        """The sessions, and whether that is all of them: the file could be read."""
        with self._lock:
            saved = self._tables.read(f"{LISTED} WHERE s.head IS NOT NULL")
            found = {row["id"]: row for row in saved or ()}
            for row in self._tables.open.execute(f"{LISTED} WHERE s.head IS NOT NULL"):
                found[row["id"]] = row
            ordered = sorted(found.values(), key=lambda row: (row["updated"], row["id"]), reverse=True)
            return [session_from(row, self._tables.me) for row in ordered], saved is not None

    def session(self, session_id: str) -> Session:
        """One session by its whole id. Raises NoSession, UnreadableSession."""
        with self._lock:
            query, wanted = f"{LISTED} WHERE s.id = ?", (session_id,)
            row = self._tables.open.execute(query, wanted).fetchone()
            if row is None:
                saved = self._tables.read(query, wanted)
                if saved is None:
                    raise self._tables.unreadable(session_id)
                if not saved:
                    raise NoSession(f"there is no session {session_id}; `mlxpaged sessions list` shows them")
                row = saved[0]
            return session_from(row, self._tables.me)

    def find(self, wanted: str) -> Session:
        """One session by its title, its id, the id as it is shown, or the start of that. Raises NoSession: none, or
        several; UnreadableSession."""
        every, complete = self._listed()
        name = wanted.casefold()
        found = [one for one in every if one.id.casefold() == name] or [
            one
            for one in every
            if (name and one.title.casefold() == name) or (len(name) >= _LEAST_ID and short_id(one.id).startswith(name))
        ]
        if len(found) == 1:
            return found[0]
        if found:
            raise NoSession(f"{len(found)} sessions are called {wanted!r}: {_named(found)}; give the id of one")
        if not complete:
            raise self._tables.unreadable(wanted)
        near = [one for one in every if name and one.title.casefold().startswith(name)]
        hint = f"is it {_named(near)}?" if near else "`mlxpaged sessions list` shows them"
        raise NoSession(f"there is no session {wanted!r}; {hint}")

    def latest(self) -> Session | None:
        """The session used last that no other process has open."""
        return next((one for one in self.sessions() if not one.busy), None)

    def messages(self, session_id: str) -> list[Message]:
        """The conversation, first turn first: from the session's head back to its start. Turns that a retry or an
        edit left behind are not among them, nor those that cannot be read."""
        with suppress(UnreadableSession):
            return self._turns(self.session(session_id))
        return []

    def _turns(self, session: Session) -> list[Message]:
        """The same; raises UnreadableSession."""
        with self._lock:
            query, wanted = "SELECT * FROM message WHERE session = ?", (session.id,)
            rows = self._tables.open.execute(query, wanted).fetchall()
            mine = session.id in self._tables.mine()
            if not mine:
                saved = self._tables.read(query, wanted)
                if saved is None:
                    raise self._tables.unreadable(session.title or session.id)
                rows = saved
            by_id = {row["id"]: message_from(row) for row in rows}
            path: list[Message] = []
            at = session.head
            while at in by_id and len(path) < len(by_id):
                path.append(by_id[at])
                at = path[-1].parent
            return [self._as_found(one, session.busy or mine) for one in reversed(path)]

    def search(self, text: str) -> list[tuple[Session, Message | None]]:
        """Every session with `text` in its title or its turns, and the last turn that has it, if one has; case does not
        matter. Turns that were left behind do not count."""
        with self._lock:
            wanted, mine = text.casefold(), set(self._tables.mine())
            saved = self._tables.read(HOLDING, (wanted,)) or ()
            rows = [row for row in saved if row["session"] not in mine]
            rows += self._tables.open.execute(HOLDING, (wanted,)).fetchall()
            hits = {row["session"]: message_from(row) for row in rows}
            return [
                (one, hits.get(one.id)) for one in self.sessions() if one.id in hits or wanted in one.title.casefold()
            ]

    def export(self, session_id: str, kind: str = "md") -> str:
        """The session as markdown ("md") or as one JSON object ("json"). Raises NoSession, UnreadableSession."""
        session = self.session(session_id)
        messages = self._turns(session)
        if kind == "json":
            return json.dumps(as_json(session, messages), ensure_ascii=False, indent=2) + "\n"
        return as_markdown(session, messages)

    def _as_found(self, message: Message, live: bool) -> Message:
        return message if live or message.state != "streaming" else replace(message, state="interrupted")


def _named(found: Sequence[Session]) -> str:
    """Sessions to choose from, by ids that differ."""
    shown = {short_id(one.id) for one in found}
    ids = [short_id(one.id) if len(shown) == len(found) else one.id for one in found]
    named = [f"{an_id} ({one.title})" for an_id, one in zip(ids, found, strict=True)]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return ", ".join(named[:_MOST_NAMED]) + more
