"""Rows in columns for people, and sizes and ages in words. Owns no data and prints nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..chat.foreign import neutralise

if TYPE_CHECKING:
    from ..chat.sessions import Session


_BROKEN = {"interrupted": "interrupted", "error": "broken off"}
"""What is said of a conversation whose last reply ended before it was done, and not because somebody wanted it."""


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows under their header, as wide as they need, safe to print; nothing where there is no row."""
    from rich.cells import cell_len, set_cell_size

    table = [tuple(header), *(tuple(neutralise(cell).replace("\n", " ") for cell in row) for row in rows)]
    if len(table) == 1:
        return []
    widths = [max(cell_len(row[index]) for row in table) for index in range(len(header))]
    return ["  ".join(map(set_cell_size, row, widths)).rstrip() for row in table]


def session_lines(sessions: Sequence[Session]) -> list[str]:
    """Saved conversations, one per line; the short id is its last letters, the ones that differ."""
    from ..chat.sessions import short_id

    rows = []
    for one in sessions:
        state = "open elsewhere" if one.busy else _BROKEN.get(one.last_state, "")
        rows.append((short_id(one.id), age(one.updated), str(one.num_messages), one.title or "-", state))
    return columns(("ID", "USED", "TURNS", "TITLE", ""), rows)


def age(moment: float, now: float | None = None) -> str:
    """How long ago a Unix time was, in its largest unit."""
    seconds = max(0.0, (time.time() if now is None else now) - moment)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "now"


def size(count: int | None) -> str:
    """Bytes as people say them."""
    if count is None:
        return "-"
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
