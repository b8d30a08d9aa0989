"""The KV pool as a picture: which part of it belongs to whom. Owns how blocks become cells and how the engine's rows
are matched with the sessions of this screen; draws nothing.

Where the engine tells the owner of every block, a cell is that block (or a few of them); where it tells counts only,
the cells show the same amounts in one order: replies, shared, cached, free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..engine.events import EngineStats, RowStats
from .state import Talk

SHARED, CACHED, FREE = "shared", "cached", "free"
Owner = int | str
"""A request id, or one of SHARED, CACHED, FREE."""


@dataclass(frozen=True, slots=True)
class Picture:
    """`cells` in reading order, each standing for `per_cell` blocks."""

    cells: tuple[Owner, ...]
    per_cell: int


def picture_of(stats: EngineStats, room: int) -> Picture:
    """The pool in at most `room` cells; none when there is no pool."""
    owners = _owners(stats)
    if not owners or room < 1:
        return Picture((), 1)
    per_cell = -(-len(owners) // room)
    if per_cell == 1:
        return Picture(tuple(owners), 1)
    groups = (owners[start : start + per_cell] for start in range(0, len(owners), per_cell))
    return Picture(tuple(_chief(group) for group in groups), per_cell)


def counts_of(stats: EngineStats) -> Counter[Owner]:
    """The blocks of each owner; a shared one counts once."""
    if not stats.block_runs:
        return Counter(_owners(stats))
    counts: Counter[Owner] = Counter()
    for group in stats.block_runs:
        for run in group:
            counts[run.owner] += run.count
    return counts


def _owners(stats: EngineStats) -> list[Owner]:
    """One owner per block, group by group."""
    if stats.block_runs:
        return [run.owner for group in stats.block_runs for run in group for _ in range(run.count)]
    held = [(row.request_id, row.num_blocks) for row in stats.rows if row.num_blocks]
    alone = stats.blocks_used - stats.blocks_shared
    owners: list[Owner] = []
    for request_id, count in _scaled(held, alone):
        owners += [request_id] * count
    owners += [SHARED] * stats.blocks_shared + [CACHED] * stats.blocks_cached
    return owners + [FREE] * (stats.blocks_total - len(owners))


def _scaled(held: Sequence[tuple[int, int]], total: int) -> Iterable[tuple[int, int]]:
    """Counts that add up to `total`: a row's own count includes blocks it shares, which are drawn once elsewhere."""
    weight = sum(count for _, count in held)
    given = so_far = 0
    for request_id, count in held:
        so_far += count
        upto = round(total * so_far / weight)
        yield request_id, upto - given
        given = upto


def _chief(group: Sequence[Owner]) -> Owner:
    """Whom a cell shows: the owner of most of its blocks, but a reply goes before what is only cached or free."""
    counts = Counter(group)
    live = {owner: count for owner, count in counts.items() if owner not in {CACHED, FREE}}
    chosen = live or counts
    return max(chosen, key=chosen.__getitem__)


def owners_of(rows: Sequence[RowStats], talks: Iterable[Talk]) -> dict[int, str]:
    """Request id -> session id, for the rows that are replies of this screen.

    The engine's ids are its own, so a row is told by its prompt's length and how far its reply is; only by the latter
    where a prompt was found whole, and so never told of. A row no session claims is another program's.
    """
    found: dict[int, str] = {}
    live = [talk for talk in talks if talk.phase.is_live and (talk.progress or talk.num_tokens)]
    for talk in sorted(live, key=lambda talk: talk.progress is None):
        likely = [row for row in rows if row.request_id not in found]
        if talk.progress:
            likely = [row for row in likely if row.prompt_tokens == talk.progress.total]
        if likely:
            best = min(likely, key=lambda row: abs(row.completion_tokens - talk.num_tokens))
            found[best.request_id] = talk.id
    return found
