"""Every conversation of this user, kept. Owns what is saved and when; one writer, many readers, several processes.

    store = Store.open()                    # Store(None) for --ephemeral: nothing touches the disk
    session = store.create(model="smollm2")
    store.ask(session.id, "Hello")          # on disk when this returns
    draft = store.reply(session.id)
    draft.feed("Hi"); draft.tick()          # on disk about once a second
    draft.finish("done", usage, timing)

Open sessions are held in memory first and written from there. So a disk that is full, a folder that is read-only, a
locked or a damaged file never stops a conversation: `problem` says it in one line, what could not be written is tried
again with the next write, and `export` works all the while. No method but `open`'s callers' own errors (NoSession,
SessionBusy) raises for the file's sake. Every method may be called from any thread; a write waits for a locked file
for two seconds at most, so an event loop calls those that write through `asyncio.to_thread` where that would be felt.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .. import paths
from ..engine.events import Timing, Usage
from ..errors import ConfigError, NoSession, SessionBusy
from .session_file import SessionFileError, in_words, memory, open_file, session_path
from .sessions import (
    Message,
    Session,
    State,
    as_json,
    as_markdown,
    message_from,
    new_id,
    owner_name,
    session_from,
    title_of,
)

CHECKPOINT_S = 1.0
_RETRY_S = 5.0
_LISTED = """
    SELECT s.*, (SELECT count(*) FROM message m WHERE m.session = s.id) AS num_messages,
    (SELECT m.state FROM message m WHERE m.id = s.head) AS head_state FROM session s
"""
_SESSION = ("id", "title", "model", "system", "params", "created", "updated", "parent", "head", "owner")
_MESSAGE = (
    *("id", "session", "parent", "role", "content", "reasoning", "state", "model", "usage", "timing", "error"),
    "created",
)


class Store:
    """The sessions of one file; `path` None: of this process only. `clock` gives the dates, `ticks` the seconds
    between checkpoints and between attempts."""

    def __init__(
        self, path: Path | None, clock: Callable[[], float] = time.time, ticks: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = path
        self.problem: str | None = None
        """Why nothing is saved at the moment, in one line; None while all is well."""
        self._clock = clock
        self._ticks = ticks
        self._me = owner_name()
        self._lock = threading.RLock()
        self._open = memory()
        self._file: sqlite3.Connection | None = None
        self._drafts: set[str] = set()  # sessions without a message: not worth keeping yet
        self._unsaved: dict[tuple[str, ...], tuple[str, tuple[Any, ...]]] = {}
        self._retry_at = 0.0
        self._connect()

    @classmethod
    def open(cls, path: Path | None = None) -> Store:
        """The user's own sessions. Never raises: see `problem`."""
        return cls(path or session_path())

    @property
    def unsaved(self) -> bool:
        """Whether something is in memory that belongs on disk."""
        return bool(self._unsaved)

    # -- reading -----------------------------------------------------------------------------------------------

    def sessions(self) -> list[Session]:
        """Every session, the last used first."""
        with self._lock:
            found = {row["id"]: row for row in self._read(f"{_LISTED} WHERE s.head IS NOT NULL")}
            for row in self._open.execute(f"{_LISTED} WHERE s.head IS NOT NULL"):
                found[row["id"]] = row
            ordered = sorted(found.values(), key=lambda row: (row["updated"], row["id"]), reverse=True)
            return [session_from(row, self._me) for row in ordered]

    def session(self, session_id: str) -> Session:
        """One session by its whole id. Raises NoSession."""
        with self._lock:
            query, wanted = f"{_LISTED} WHERE s.id = ?", (session_id,)
            row = self._open.execute(query, wanted).fetchone() or next(iter(self._read(query, wanted)), None)
            if row is None:
                raise NoSession(f"there is no session {session_id}; `mlxpaged sessions list` shows them")
            return session_from(row, self._me)

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
            rows = self._open.execute(query, wanted).fetchall() or self._read(query, wanted)
            by_id = {row["id"]: message_from(row) for row in rows}
            path: list[Message] = []
            at = session.head
            while at in by_id and len(path) < len(by_id):
                path.append(by_id[at])
                at = path[-1].parent
            mine = session_id in self._mine()
            return [self._as_found(one, session.busy or mine) for one in reversed(path)]

    def search(self, text: str) -> list[tuple[Session, Message]]:
        """The last turn with `text` in it, of every session that has one; case does not matter."""
        with self._lock:
            query = "SELECT * FROM message WHERE holds(content, ?) ORDER BY id"
            wanted = (text.casefold(),)
            hits = {row["session"]: message_from(row) for row in self._read(query, wanted)}
            hits |= {row["session"]: message_from(row) for row in self._open.execute(query, wanted)}
            return [(one, hits[one.id]) for one in self.sessions() if one.id in hits]

    def export(self, session_id: str, kind: str = "md") -> str:
        """The session as markdown ("md") or as one JSON object ("json")."""
        session, messages = self.session(session_id), self.messages(session_id)
        if kind == "json":
            return json.dumps(as_json(session, messages), ensure_ascii=False, indent=2) + "\n"
        return as_markdown(session, messages)

    # -- sessions ----------------------------------------------------------------------------------------------

    def create(
        self,
        model: str | None = None,
        system: str | None = None,
        params: Mapping[str, float] | None = None,
        title: str = "",
        parent: str | None = None,
    ) -> Session:
        """A new session, open here. It reaches the disk with its first message."""
        with self._lock:
            now = self._clock()
            values = (new_id(), title, model, system, json.dumps(dict(params or {})), now, now, parent, None, self._me)
            self._open.execute(_insert("session", _SESSION), values)
            self._drafts.add(values[0])
            return self.session(values[0])

    def claim(self, session_id: str) -> Session:
        """Open a session here, to go on with it. Raises SessionBusy while another live process has it, NoSession.
        A reply whose process died becomes "interrupted"."""
        with self._lock:
            if session_id in self._mine():
                return self.session(session_id)
            session = self.session(session_id)
            if session.busy:
                raise SessionBusy(f"the session {session.title or session.id!r} is open in another mlxpaged; fork it")
            torn = [one for one in self.messages(session_id) if one.state == "interrupted"]
            self._take(session_id)
            for message in torn:
                self._put(message)
            self._flush()
            return self.session(session_id)

    def release(self, session_id: str) -> None:
        """Close a session here; another process may open it."""
        with self._lock:
            if session_id in self._drafts:
                self._drafts.discard(session_id)
                self._open.execute("DELETE FROM session WHERE id = ?", (session_id,))
            elif session_id in self._mine():
                self._set(session_id, "owner", None)
                if self.path and not self._unsaved:
                    self._open.execute("DELETE FROM session WHERE id = ?", (session_id,))

    def fork(self, session_id: str, at: str | None = None) -> Session:
        """A new session with the conversation of this one up to and with message `at` (None: all of it)."""
        with self._lock:
            old, messages = self.session(session_id), self.messages(session_id)
            ids = [one.id for one in messages]
            if at is not None:
                if at not in ids:
                    raise NoSession(f"the session {old.title or old.id!r} has no message {at}")
                messages = messages[: ids.index(at) + 1]
            new = self.create(old.model, old.system, old.params, f"{old.title} (fork)", parent=old.id)
            before = None
            for one in messages:
                state: State = "interrupted" if one.state == "streaming" else one.state
                one = replace(one, id=new_id(), session=new.id, parent=before, state=state)
                before = self._add(one)
            return self.session(new.id)

    def take_in(self, found: Sequence[tuple[Session, Sequence[Message]]]) -> None:
        """Keep sessions that were written out (see `sessions.from_json`), closed. One that is here with other turns
        becomes a session of its own. Raises ConfigError, and keeps none, where one is here already or has no turns."""
        with self._lock:
            here = {one.id for one in self.sessions()}
            for session, messages in found:
                name = session.title or session.id
                if not messages:
                    raise ConfigError(f"the conversation {name!r} has no turns")
                known = {(one.id, one.content) for one in self.messages(session.id)} if session.id in here else set()
                if all((one.id, one.content) in known for one in messages):
                    raise ConfigError(f"the conversation {name!r} is here already (id {session.id})")
            for session, messages in found:
                self._take_in(session, messages, session.id in here)

    def _take_in(self, session: Session, messages: Sequence[Message], anew: bool) -> None:
        if anew:
            session = replace(session, id=new_id(), title=f"{session.title} (imported)", parent=session.id)
        params, when = json.dumps(dict(session.params)), (session.created, session.updated)
        about = (session.id, session.title, session.model, session.system, params, *when, session.parent)
        self._open.execute(_insert("session", _SESSION), (*about, None, self._me))
        self._drafts.add(session.id)
        before = None
        for one in messages:
            state: State = "interrupted" if one.state == "streaming" else one.state
            own = new_id() if anew else one.id
            before = self._add(replace(one, id=own, session=session.id, parent=before, state=state))
        self._set(session.id, "updated", session.updated)
        self.release(session.id)

    def rename(self, session_id: str, title: str) -> None:
        """Give a session a title; one that is open elsewhere too."""
        self._set(session_id, "title", " ".join(title.split()))

    def set_model(self, session_id: str, model: str | None) -> None:
        """Which model answers from now on."""
        self._set(session_id, "model", model)

    def set_system(self, session_id: str, system: str | None) -> None:
        """The system message from now on."""
        self._set(session_id, "system", system)

    def set_params(self, session_id: str, params: Mapping[str, float]) -> None:
        """The sampling values from now on."""
        self._set(session_id, "params", json.dumps(dict(params)))

    def remove(self, session_id: str) -> None:
        """Delete a session for good. Raises SessionBusy, NoSession."""
        with self._lock:
            session = self.session(session_id)
            if session.busy:
                raise SessionBusy(f"the session {session.title or session.id!r} is open in another mlxpaged; close it")
            self._drafts.discard(session_id)
            self._write(("remove", session_id), "DELETE FROM session WHERE id = ?", (session_id,))

    # -- turns -------------------------------------------------------------------------------------------------

    def ask(self, session_id: str, text: str) -> Message:
        """The person's next turn; written before this returns, so before anything is generated."""
        with self._lock:
            session = self.claim(session_id)
            message = Message(new_id(), session_id, "user", text, parent=session.head, created=self._clock())
            self._add(message, now=True)
            if not session.title:
                self._set(session_id, "title", title_of(text))
            return message

    def reply(self, session_id: str, model: str | None = None) -> ReplyDraft:
        """Begin the reply to the session's last turn. It is kept from its first checkpoint on."""
        with self._lock:
            session = self.claim(session_id)
            message = Message(
                new_id(),
                session_id,
                "assistant",
                "",
                parent=session.head,
                state="streaming",
                model=model or session.model,
                created=self._clock(),
            )
            self._add(message)
            return ReplyDraft(self, message)

    def resume(self, message_id: str) -> ReplyDraft:
        """Go on with a reply that was stopped or interrupted: what is fed is put after what is there."""
        with self._lock:
            row = self._open.execute("SELECT * FROM message WHERE id = ?", (message_id,)).fetchone()
            if row is None:
                raise NoSession(f"no open session has a message {message_id}")
            message = replace(message_from(row), state="streaming", error=None)
            self.save(message)
            return ReplyDraft(self, message)

    def rewind(self, session_id: str, message_id: str | None) -> None:
        """Make `message_id` (None: nothing) the last turn, for undo, retry and edit. Later turns stay on disk."""
        self._set(session_id, "head", message_id)

    def save(self, message: Message) -> None:
        """Write a turn as it now is."""
        with self._lock:
            self._put(message)
            self._touch(message.session)
            self._flush()

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> Path | None:
        """Save what is left and let go of every session. Where the file cannot take it, every unsaved session goes
        into one JSON file elsewhere: its path, None when nothing had to be rescued."""
        with self._lock:
            unsaved = self._unsaved_sessions()
            for session_id in self._mine():
                if session_id not in self._drafts:
                    self._set(session_id, "owner", None)
            self._flush(now=True)
            rescued = self._rescue(unsaved) if self._unsaved and self.path is not None else None
            self._open.close()
            if self._file:
                with suppress(sqlite3.Error):
                    self._file.close()
            return rescued

    def _rescue(self, session_ids: Sequence[str]) -> Path | None:
        if not session_ids:
            return None
        every = [as_json(self.session(one), self.messages(one)) for one in session_ids]
        text = json.dumps(every, ensure_ascii=False, indent=2)
        for folder in (paths.data_dir(), paths.state_dir(), Path(tempfile.gettempdir())):
            file = folder / f"mlxpaged-unsaved-{new_id().lower()}.json"
            try:
                file.touch(mode=0o600)
                file.write_text(text, encoding="utf-8")
                return file
            except OSError:
                with suppress(OSError):
                    file.unlink(missing_ok=True)
        return None

    def _unsaved_sessions(self) -> list[str]:
        touched = {key[1] for key in self._unsaved}
        return [one for one in self._mine() if one in touched]

    # -- memory first, then the file ---------------------------------------------------------------------------

    def _mine(self) -> list[str]:
        return [row["id"] for row in self._open.execute("SELECT id FROM session")]

    def _as_found(self, message: Message, live: bool) -> Message:
        return message if live or message.state != "streaming" else replace(message, state="interrupted")

    def _add(self, message: Message, now: bool = False) -> str:
        """The session's new last turn; `now`: before this returns, if it can be written at all."""
        if message.session in self._drafts:
            self._drafts.discard(message.session)
            row = self._open.execute("SELECT * FROM session WHERE id = ?", (message.session,)).fetchone()
            self._unsaved["session", message.session] = (
                _insert("session", _SESSION),
                tuple(row[name] for name in _SESSION),
            )
        self._put(message)
        self._queue(("session", message.session, "head"), *_update("head", message.id, message.session))
        self._touch(message.session)
        self._flush(now)
        return message.id

    def _put(self, message: Message) -> None:
        self._queue(("message", message.session, message.id), _insert("message", _MESSAGE), _row_of(message))

    def _touch(self, session_id: str) -> None:
        self._queue(("session", session_id, "updated"), *_update("updated", self._clock(), session_id))

    def _set(self, session_id: str, column: str, value: Any) -> None:
        with self._lock:
            self.session(session_id)
            self._write(("session", session_id, column), *_update(column, value, session_id))

    def _write(self, key: tuple[str, ...], statement: str, values: tuple[Any, ...]) -> None:
        self._queue(key, statement, values)
        self._flush()

    def _queue(self, key: tuple[str, ...], statement: str, values: tuple[Any, ...]) -> None:
        """Done in memory now, and in the file by the next flush; the same key again replaces what waits."""
        self._open.execute(statement, values)
        if key[1] not in self._drafts:
            self._unsaved[key] = (statement, values)

    def _flush(self, now: bool = False) -> None:
        if self.path is None:
            self._unsaved.clear()
        if not self._unsaved or (self._ticks() < self._retry_at and not now):
            return
        if self._file is None:
            self._connect()
        if self._file is None:
            return
        try:
            self._file.execute("BEGIN IMMEDIATE")
            for statement, values in self._unsaved.values():
                self._file.execute(statement, values)
            self._file.execute("COMMIT")
            self._unsaved.clear()
            self.problem = None
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                self._file.rollback()
            self._failed(error)

    def _take(self, session_id: str) -> None:
        """Session and turns into memory, and our name on it; a race for it is lost by SessionBusy."""
        session = self._read("SELECT * FROM session WHERE id = ?", (session_id,))[0]
        turns = self._read("SELECT * FROM message WHERE session = ?", (session_id,))
        changed = self._file_changed(
            "UPDATE session SET owner = ? WHERE id = ? AND owner IS ?", (self._me, session_id, session["owner"])
        )
        if changed == 0:
            raise SessionBusy(f"the session {session['title'] or session_id!r} was just opened in another mlxpaged")
        self._open.execute(_insert("session", _SESSION), tuple(session[name] for name in _SESSION))
        self._open.execute(*_update("owner", self._me, session_id))
        self._open.executemany(_insert("message", _MESSAGE), [tuple(turn[name] for name in _MESSAGE) for turn in turns])

    def _file_changed(self, statement: str, values: tuple[Any, ...]) -> int | None:
        """Rows changed at once; None when the file cannot be written, which `problem` tells."""
        try:
            return self._file.execute(statement, values).rowcount if self._file else None
        except sqlite3.Error as error:
            self._failed(error)
            return None

    def _read(self, query: str, values: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        if self._file is None:
            return []
        try:
            return self._file.execute(query, values).fetchall()
        except sqlite3.Error as error:
            self._failed(error)
            return []

    def _connect(self) -> None:
        if self.path is None:
            return
        try:
            self._file = open_file(self.path)
        except SessionFileError as error:
            self.problem = str(error)
            self._retry_at = self._ticks() + _RETRY_S

    def _failed(self, error: sqlite3.Error) -> None:
        assert self.path
        self.problem = in_words(error, self.path)
        self._retry_at = self._ticks() + _RETRY_S


class ReplyDraft:
    """One reply on its way in. `feed` what comes, `tick` now and then, `finish` at its end, whatever that is."""

    def __init__(self, store: Store, message: Message) -> None:
        self._store = store
        self._message = message
        self._pieces = [message.content]
        self._thoughts = [message.reasoning]
        self._dirty = False
        self._next = store._ticks() + CHECKPOINT_S

    @property
    def id(self) -> str:
        """The message's id."""
        return self._message.id

    @property
    def text(self) -> str:
        """What there is of the reply."""
        return "".join(self._pieces)

    def feed(self, text: str, reasoning: str = "") -> None:
        """Takes the next piece and writes a checkpoint when the last one is a second old."""
        self._pieces.append(text)
        self._thoughts.append(reasoning)
        self._dirty = True
        self.tick()

    def tick(self) -> None:
        """Writes a checkpoint when something came and the last one is a second old."""
        if self._dirty and self._store._ticks() >= self._next:
            self._next = self._store._ticks() + CHECKPOINT_S
            self._dirty = False
            self._store.save(self._now())

    def finish(
        self, state: State, usage: Usage | None = None, timing: Timing | None = None, error: str | None = None
    ) -> Message:
        """The reply as it stays: "done", "stopped" by the person, or "error" with the reason."""
        self._message = replace(self._now(), state=state, usage=usage, timing=timing, error=error)
        self._store.save(self._message)
        return self._message

    def drop(self) -> None:
        """Nothing came: the turn before is the last one again."""
        self._store.rewind(self._message.session, self._message.parent)
        self._store.save(replace(self._now(), state="stopped"))

    def _now(self) -> Message:
        return replace(self._message, content="".join(self._pieces), reasoning="".join(self._thoughts))


def _insert(table: str, columns: Sequence[str]) -> str:
    """Writes a row or brings it up to date; never REPLACE, which would delete a session's turns with it."""
    marks = ", ".join("?" * len(columns))
    kept = ", ".join(f"{name} = excluded.{name}" for name in columns[1:])
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks}) ON CONFLICT (id) DO UPDATE SET {kept}"


def _update(column: str, value: Any, session_id: str) -> tuple[str, tuple[Any, ...]]:
    return f"UPDATE session SET {column} = ? WHERE id = ?", (value, session_id)


def _row_of(message: Message) -> tuple[Any, ...]:
    about = {name: getattr(message, name) for name in _MESSAGE}
    for name in ("usage", "timing"):
        about[name] = json.dumps(asdict(about[name])) if about[name] else None
    return tuple(about[name] for name in _MESSAGE)
