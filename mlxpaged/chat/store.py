"""Every conversation of this user, kept. Owns what is saved and when; one writer, many readers, several processes.

    store = Store.open()                    # Store(None) for --ephemeral: nothing touches the disk
    session = store.create(model="smollm2")
    store.ask(session.id, "Hello")          # on disk when this returns
    draft = store.reply(session.id)
    draft.feed("Hi"); draft.tick()          # on disk about once a second
    draft.finish("done", usage, timing)

Open sessions are held in memory first and written from there. So a disk that is full, a folder that is read-only, a
locked, a damaged or a stolen file never stops a conversation: `problem` says it in one line, what could not be written
is tried again with the next write, and `export` works all the while. For the file's sake only UnreadableSession is
raised, for a session that is not open here. Every method may be called from any thread; a write waits for a locked file
for two seconds at most, so an event loop calls those that write through `asyncio.to_thread` where that would be felt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, NoSession, SessionBusy
from .reply_draft import ReplyDraft
from .rescue import rescue
from .session_file import session_path
from .session_reader import SessionReader
from .session_rows import MESSAGE, insert, message_from, row_of, update
from .session_tables import SessionTables
from .sessions import Message, Session, State, as_json, new_id, title_of


class Store(SessionReader):
    """The sessions of one file; `path` None: of this process only. `clock` gives the dates, `ticks` the seconds
    between checkpoints and between attempts."""

    def __init__(
        self, path: Path | None, clock: Callable[[], float] = time.time, ticks: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(SessionTables(path, ticks))
        self.path = path
        self.ticks = ticks
        self._clock = clock

    @classmethod
    def open(cls, path: Path | None = None) -> Store:
        """The user's own sessions. Never raises: see `problem`."""
        return cls(path or session_path())

    @property
    def unsaved(self) -> bool:
        """Whether something is in memory that belongs on disk."""
        return self._tables.unsaved

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
            stored = json.dumps(dict(params or {}))
            values = (new_id(), title, model, system, stored, now, now, parent, None, self._tables.me)
            self._tables.begin(values[0], values)
            return self.session(values[0])

    def claim(self, session_id: str) -> Session:
        """Open a session here, to go on with it. Raises SessionBusy while another live process has it, NoSession,
        UnreadableSession. A reply whose process died becomes "interrupted"."""
        with self._lock:
            if session_id in self._tables.mine():
                return self.session(session_id)
            session = self.session(session_id)
            if session.busy:
                raise SessionBusy(f"the session {session.title or session.id!r} is open in another mlxpaged; fork it")
            torn = [one for one in self._turns(session) if one.state == "interrupted"]
            self._tables.take(session_id)
            for message in torn:
                self._put(message)
            self._tables.flush()
            return self.session(session_id)

    def release(self, session_id: str) -> None:
        """Close a session here; another process may open it."""
        with self._lock:
            if self._tables.is_draft(session_id):
                self._tables.forget(session_id)
            elif session_id in self._tables.mine():
                self._set(session_id, "owner", None)
                if self.path and not self.unsaved:
                    self._tables.forget(session_id)

    def fork(self, session_id: str, at: str | None = None) -> Session:
        """A new session with the conversation of this one up to and with message `at` (None: all of it)."""
        with self._lock:
            old = self.session(session_id)
            messages = self._turns(old)
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

    def take_in(self, found: Sequence[tuple[Session, Sequence[Message]]]) -> int:
        """Keep sessions that were written out (see `sessions.from_json`), closed; how many. One that is here with other
        turns becomes a session of its own, one that is here as it is is left out. Raises ConfigError, and keeps none,
        where all are here already or one has no turns."""
        with self._lock:
            here = {one.id for one in self.sessions()}
            new = []
            for session, messages in found:
                name = session.title or session.id
                if not messages:
                    raise ConfigError(f"the conversation {name!r} has no turns")
                known = {(one.id, one.content) for one in self.messages(session.id)} if session.id in here else set()
                if any((one.id, one.content) not in known for one in messages):
                    new.append((session, messages))
            if found and not new:
                named = f"the conversation {name!r} is" if len(found) == 1 else f"all {len(found)} conversations are"
                raise ConfigError(f"{named} here already (id {', '.join(one.id for one, _ in found[:3])})")
            for session, messages in new:
                self._take_in(session, messages, session.id in here)
            return len(new)

    def _take_in(self, session: Session, messages: Sequence[Message], anew: bool) -> None:
        if anew:
            session = replace(session, id=new_id(), title=f"{session.title} (imported)", parent=session.id)
        params, when = json.dumps(dict(session.params)), (session.created, session.updated)
        about = (session.id, session.title, session.model, session.system, params, *when, session.parent)
        self._tables.begin(session.id, (*about, None, self._tables.me))
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
            row = self._tables.open.execute("SELECT * FROM message WHERE id = ?", (message_id,)).fetchone()
            if row is None:
                raise NoSession(f"no open session has a message {message_id}")
            message = replace(message_from(row), state="streaming", error=None)
            self.save(message)
            return ReplyDraft(self, message)

    def rewind(self, session_id: str, message_id: str | None) -> None:
        """Make `message_id` (None: nothing) the last turn, for undo, retry and edit. Later turns stay on disk; a title
        that the first of them gave goes with it."""
        with self._lock:
            session = self.session(session_id)
            if message_id is None and session.title:
                first = next(iter(self.messages(session_id)), None)
                if first and session.title == title_of(first.content):
                    self._set(session_id, "title", "")
            self._set(session_id, "head", message_id)

    def save(self, message: Message) -> None:
        """Write a turn as it now is."""
        with self._lock:
            self._put(message)
            self._touch(message.session)
            self._tables.flush()

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> Path | None:
        """Save what is left and let go of every session. Where the file cannot take it, every unsaved session goes
        into one JSON file elsewhere: its path, None when nothing had to be rescued. So does, whole, every session that
        was open here, where the file was taken away meanwhile or does not hold what was written to it."""
        with self._lock:
            unsaved = self._tables.unsaved_sessions()
            for session_id in self._tables.mine():
                if not self._tables.is_draft(session_id):
                    self._set(session_id, "owner", None)
            self._tables.flush(now=True)
            self._tables.close_file()
            if self._tables.lost:
                unsaved = self._tables.unsaved_sessions()
            lost = unsaved if self.unsaved and self.path else ()
            rescued = rescue([as_json(self.session(one), self.messages(one)) for one in lost])
            self._tables.close()
            return rescued

    # -- what a change is made of ------------------------------------------------------------------------------

    def _add(self, message: Message, now: bool = False) -> str:
        """The session's new last turn; `now`: before this returns, if it can be written at all."""
        self._tables.keep(message.session)
        self._put(message)
        self._tables.queue(("session", message.session, "head"), *update("head", message.id, message.session))
        self._touch(message.session)
        self._tables.flush(now)
        return message.id

    def _put(self, message: Message) -> None:
        self._tables.queue(("message", message.session, message.id), insert("message", MESSAGE), row_of(message))

    def _touch(self, session_id: str) -> None:
        self._tables.queue(("session", session_id, "updated"), *update("updated", self._clock(), session_id))

    def _set(self, session_id: str, column: str, value: Any) -> None:
        with self._lock:
            self.session(session_id)
            self._write(("session", session_id, column), *update(column, value, session_id))

    def _write(self, key: tuple[str, ...], statement: str, values: tuple[Any, ...]) -> None:
        self._tables.queue(key, statement, values)
        self._tables.flush()
