"""What can still be read of a damaged session file, as the records that `mlxpaged sessions import` takes. Reads the
file's bytes and changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ..errors import ConfigError
from .session_pages import SessionPages, Values
from .session_rows import MESSAGE, SESSION, message_from, session_from
from .sessions import Message, Session, State, as_json, title_of

_KINDS: Mapping[str, tuple[type, ...]] = {"t": (str,), "T": (str, type(None)), "n": (float, int)}
_SESSION_KINDS, _MESSAGE_KINDS = "ttTTtnnTTT", "ttTttttTTTTn"
"""A letter per column: text, text or nothing, a number."""


@dataclass(frozen=True, slots=True)
class Salvage:
    """Sessions that were saved (`records`, see `sessions.as_json`), with `num_messages` in all; what is known to have
    been there and could not be read, which may be less than there was."""

    records: list[dict[str, Any]]
    num_messages: int
    lost_sessions: int
    lost_messages: int


@dataclass(frozen=True, slots=True)
class _Found:
    sessions: dict[str, Session]
    messages: dict[str, Message]
    places: dict[str, int]
    """A message's rowid: its place in the order of writing."""


def salvage(path: Path) -> Salvage:
    """Reads what it can of the file and its -wal. Raises ConfigError where there is no such file, where it is none of
    ours, and where no conversation can be read."""
    try:
        content = path.read_bytes()
        log = path.with_name(f"{path.name}-wal")
        pages = SessionPages(content, log.read_bytes() if log.exists() else b"")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    found = _found(pages.rows())
    by_session: dict[str, list[Message]] = {}
    for message in sorted(found.messages.values(), key=lambda one: found.places[one.id]):
        by_session.setdefault(message.session, []).append(message)
    records, num_messages = [], 0
    for session_id, messages in by_session.items():
        session = found.sessions.get(session_id)
        if session and session.head is None:
            continue  # its owner took every message back
        turns = _turns(session.head if session else None, messages, found)
        records.append(as_json(session or _nameless(session_id, messages), turns))
        num_messages += len(turns)
    if not records:
        raise ConfigError(
            f"no conversation can be read from {path}" if pages.is_database else f"{path} is no file of conversations"
        )
    return Salvage(records, num_messages, *_lost(found, pages.keys()))


def _found(rows: Iterable[tuple[int, Values]]) -> _Found:
    found = _Found({}, {}, {})
    for rowid, values in rows:
        if _fits(values, _SESSION_KINDS):
            row = {**dict(zip(SESSION, values, strict=False)), "num_messages": 0, "head_state": None, "owner": None}
            found.sessions[row["id"]] = session_from(row, "")
        elif _fits(values, _MESSAGE_KINDS):
            message = message_from(dict(zip(MESSAGE, values, strict=False)))
            if message.state in get_args(State):
                found.messages[message.id] = message
                found.places[message.id] = rowid
    return found


def _fits(values: Values, kinds: str) -> bool:
    return len(values) == len(kinds) and all(
        isinstance(value, _KINDS[kind]) for value, kind in zip(values, kinds, strict=True)
    )


def _turns(head: str | None, messages: list[Message], found: _Found) -> list[Message]:
    """The conversation from its start to its head. Where a message cannot be read, the one written last before it
    takes its place: better a turn that its owner had left behind than half a conversation less."""
    path: list[Message] = []
    at = head
    while len(path) < len(messages):
        one = found.messages.get(at) if at else None
        if one is None:
            if path and at is None:
                break  # the start
            earlier = [other for other in messages if not path or found.places[other.id] < found.places[path[-1].id]]
            if not earlier:
                break
            one = earlier[-1]
        path.append(one)
        at = one.parent
    return path[::-1]


def _nameless(session_id: str, messages: list[Message]) -> Session:
    """What is known of a session of which only messages can be read."""
    first, last = messages[0], messages[-1]
    model = next((one.model for one in reversed(messages) if one.model), None)
    title = title_of(next((one.content for one in messages if one.role == "user"), ""))
    return Session(session_id, title, model, created=first.created, updated=last.created)


def _lost(found: _Found, keys: Iterable[Values]) -> tuple[int, int]:
    """How many sessions without any message, and how many messages, are named somewhere and cannot be read. The
    indexes name a session once for itself and once for each of its messages, a message once."""
    indexed = Counter(values[0] for values in keys if _fits(values, "tn"))
    ended = {one.id for one in found.sessions.values() if one.head is None}
    saved = {one.session for one in found.messages.values()}
    sessions = saved | found.sessions.keys() | {name for name, count in indexed.items() if count > 1}
    named = {one.parent for one in found.messages.values()} | {one.head for one in found.sessions.values()}
    messages = (named | indexed.keys()) - found.messages.keys() - sessions - {None}
    return len(sessions - saved - ended), len(messages)
