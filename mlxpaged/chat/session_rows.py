"""How a session and a turn lie in the tables of the session file: the columns, the statements that write them, and what
a row read back means. Opens nothing and runs nothing."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias, TypeVar

from ..engine.events import Timing, Usage
from .sessions import Message, Session, State, is_alive

Kind = TypeVar("Kind")
Row: TypeAlias = sqlite3.Row | Mapping[str, Any]

LISTED = """
    SELECT s.*, (
        WITH RECURSIVE turn(id, parent) AS (
            SELECT m.id, m.parent FROM message m WHERE m.id = s.head
            UNION SELECT m.id, m.parent FROM message m JOIN turn ON m.id = turn.parent
        )
        SELECT count(*) FROM turn
    ) AS num_messages, (SELECT m.state FROM message m WHERE m.id = s.head) AS head_state FROM session s
"""
"""Sessions; their messages are counted from the head to the start, so without those that were left behind."""

HOLDING = """
    WITH RECURSIVE turn(id, parent) AS (
        SELECT m.id, m.parent FROM session s JOIN message m ON m.id = s.head
        UNION SELECT m.id, m.parent FROM message m JOIN turn ON m.id = turn.parent
    )
    SELECT * FROM message WHERE id IN (SELECT id FROM turn) AND holds(content, ?) ORDER BY id
"""
"""Turns that hold a text, the newest last, without those that were left behind."""

SESSION = ("id", "title", "model", "system", "params", "created", "updated", "parent", "head", "owner")
MESSAGE = (
    *("id", "session", "parent", "role", "content", "reasoning", "state", "model", "usage", "timing", "error"),
    "created",
)


def session_from(row: Row, me: str) -> Session:
    """A row of the session list, with its counts."""
    elsewhere = row["owner"] not in {None, me} and is_alive(row["owner"])
    state: State = row["head_state"] or "done"
    if state == "streaming" and row["owner"] != me and not elsewhere:
        state = "interrupted"
    return Session(
        id=row["id"],
        title=row["title"],
        model=row["model"],
        system=row["system"],
        params=_read(dict, row["params"]) or {},
        created=row["created"],
        updated=row["updated"],
        parent=row["parent"],
        head=row["head"],
        num_messages=row["num_messages"],
        busy=elsewhere,
        last_state=state,
    )


def message_from(row: Row) -> Message:
    """A row of the message table."""
    return Message(
        id=row["id"],
        session=row["session"],
        role=row["role"],
        content=row["content"],
        parent=row["parent"],
        reasoning=row["reasoning"],
        state=row["state"],
        model=row["model"],
        usage=_read(Usage, row["usage"]),
        timing=_read(Timing, row["timing"]),
        error=row["error"],
        created=row["created"],
    )


def _read(kind: Callable[..., Kind], text: str | None) -> Kind | None:
    """A value from its JSON; a damaged one costs the figures, not the conversation."""
    try:
        return kind(**json.loads(text)) if text else None
    except (ValueError, TypeError):
        return None


def insert(table: str, columns: Sequence[str]) -> str:
    """Writes a row or brings it up to date; never REPLACE, which would delete a session's turns with it."""
    marks = ", ".join("?" * len(columns))
    kept = ", ".join(f"{name} = excluded.{name}" for name in columns[1:])
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks}) ON CONFLICT (id) DO UPDATE SET {kept}"


def update(column: str, value: Any, session_id: str) -> tuple[str, tuple[Any, ...]]:
    return f"UPDATE session SET {column} = ? WHERE id = ?", (value, session_id)


def row_of(message: Message) -> tuple[Any, ...]:
    about = {name: getattr(message, name) for name in MESSAGE}
    for name in ("usage", "timing"):
        about[name] = json.dumps(asdict(about[name])) if about[name] else None
    return tuple(about[name] for name in MESSAGE)
