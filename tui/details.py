"""The engine from inside, beside the transcript. Owns what is shown of a session's model, context and turns, of the KV
pool and of everybody's requests; asks nobody for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from rich.cells import cell_len, set_cell_size
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Sparkline

from ..chat.backend import ModelCard
from ..chat.foreign import neutralise
from ..engine.events import EngineStats, RowStats
from .figures import count, values_in_words
from .pool import Owner, counts_of, owners_of, picture_of
from .state import Talk, Turn, queued_in_words
from .steady import Steady
from .themes import hue_of

LEAST_POOL_ROWS, MOST_POOL_ROWS, OTHER_ROWS = 6, 24, 32
TURN_ROWS = 6
NEARLY_FULL = 0.85
SMOOTHED = 2
"""Looks at the engine whose mean is the rate shown: two seconds of them."""

_OTHERS = "$foreground 55%"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True)
class View:
    """All that the pane shows at one moment."""

    talk: Talk
    talks: Sequence[Talk]
    card: ModelCard | None
    given: Mapping[str, float]
    stats: EngineStats | None
    rates: Sequence[float]


class Details(VerticalScroll, can_focus=False):
    """Sections from the session to the engine."""

    def __init__(self) -> None:
        super().__init__()
        self._parts = {name: Steady("section") for name in ("model", "context", "turns", "pool", "rows")}
        self._rate_head = Steady("section")
        self._rates = Sparkline([0.0], summary_function=max)

    def compose(self) -> ComposeResult:
        for name in ("model", "context", "turns", "pool"):
            yield self._parts[name]
        yield self._rate_head
        yield self._rates
        yield self._parts["rows"]

    def show(self, view: View) -> None:
        """Draws what differs from the last time."""
        width = max(self.scrollable_content_region.width, 12)
        stats = view.stats
        owners = owners_of(stats.rows, view.talks) if stats else {}
        hues = {talk.id: hue_of(position) for position, talk in enumerate(view.talks)}
        self._parts["model"].say(_model(view.talk, view.card, view.given, width))
        self._parts["context"].say(_context(view, width))
        self._parts["turns"].say(_turns(view.talk.turns or [], width))
        self._parts["turns"].display = any(turn.usage for turn in view.talk.turns or [])
        rows = min(max(self.size.height - OTHER_ROWS, LEAST_POOL_ROWS), MOST_POOL_ROWS)
        self._parts["pool"].say(_pool(stats, owners, hues, (width, rows)))
        now = sum(view.rates[-SMOOTHED:]) / SMOOTHED
        self._rate_head.say(_head("THROUGHPUT", f"{now:.0f} tok/s"))
        self._rates.data = list(view.rates)[-width:] or [0.0]
        self._parts["rows"].say(_rows(view, owners, hues, width))


class Rates:
    """Tokens per second of the whole engine, from its counter at successive looks."""

    def __init__(self, length: int = 120) -> None:
        self.values: deque[float] = deque([0.0] * 40, length)
        self._last: tuple[float, int] | None = None

    def look(self, now: float, generated_tokens: int) -> None:
        """The counter stands at `generated_tokens` at `now` (seconds)."""
        if self._last and now > self._last[0]:
            grown = max(generated_tokens - self._last[1], 0)  # a restarted server counts from 0
            self.values.append(grown / (now - self._last[0]))
        self._last = (now, generated_tokens)


def _head(title: str, right: str = "") -> Content:
    return Content.assemble((title, "$foreground-muted bold"), (f"  {right}" if right else "", "$foreground"))


def bar(share: float, width: int, colour: str) -> Content:
    """A horizontal bar, to an eighth of a cell."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (_EIGHTHS[rest] if rest else "")
    return Content.assemble((filled, f"{colour} on $panel"), (" " * (width - len(filled)), "on $panel"))


def _model(talk: Talk, card: ModelCard | None, given: Mapping[str, float], width: int) -> Content:
    lines = [_head("MODEL")]
    if card is None:
        lines.append(Content.styled("not there yet", "$foreground-muted"))
    else:
        name, stored = neutralise(card.name), neutralise(card.quantisation or "")
        between = "  " if cell_len(name) + 2 + cell_len(stored) <= width else "\n"
        lines.append(Content.assemble((name, "bold"), (f"{between}{stored}" if stored else "", "$foreground")))
        about = [neutralise(card.family)] if card.family else []
        about += [f"{count(card.context_len)} context"] if card.context_len else []
        about += [card.served_by] if card.served_by != "paged" else []
        lines.append(Content.styled(" · ".join(about), "$foreground-muted"))
    values = {**(card.defaults if card else {}), **given, **talk.params}
    lines.append(Content.styled(values_in_words(values) or "greedy", "$foreground-muted"))
    if talk.params:
        names = ", ".join(talk.params).replace("_", " ")
        lines.append(Content.styled(f"set in this session: {names}", "$foreground"))
    if talk.system:
        first = " ".join(neutralise(talk.system).split())
        lines.append(Content.styled(f"system: {first[:60]}{'…' * (len(first) > 60)}", "$foreground-muted"))
    return Content("\n").join(lines)


def _context(view: View, width: int) -> Content:
    limit = view.card.context_len if view.card else None
    used = view.talk.context_used
    if not limit:
        return Content("\n").join([_head("CONTEXT", f"{count(used)} tokens"), bar(0, width, "$primary")])
    share = used / limit
    colour = "$warning" if share > NEARLY_FULL else "$primary"
    lines = [_head("CONTEXT", f"{count(used)} of {count(limit)} · {share:.0%}"), bar(share, width, colour)]
    return Content("\n").join(lines)


def _turns(turns: Sequence[Turn], width: int) -> Content:
    """The prompt of each of the last replies: the part that was found and the part that was computed."""
    told = [turn.usage for turn in turns if turn.usage]
    lines = [_head("PROMPT TOKENS BY TURN")]
    widest = max((usage.prompt_tokens for usage in told), default=1)
    room = width - 14
    for number, usage in list(enumerate(told, 1))[-TURN_ROWS:]:
        cells = max(round(usage.prompt_tokens / widest * room), 1)
        cached = round(usage.cached_tokens / max(usage.prompt_tokens, 1) * cells)
        lines.append(
            Content.assemble(
                (f"{number:>3} ", "$foreground-muted"),
                ("█" * cached, "$success"),
                ("▒" * (cells - cached), "$primary"),
                (" " * (room - cells + 1), ""),
                (f"{count(usage.cached_tokens):>4}", "$success"),
                ("+", "$foreground-muted"),
                (f"{count(usage.prompt_tokens - usage.cached_tokens)}", "$primary"),
            )
        )
    lines.append(
        Content.assemble(
            ("█", "$success"),
            (" cached  ", "$foreground-muted"),
            ("▒", "$primary"),
            (" computed", "$foreground-muted"),
        )
    )
    return Content("\n").join(lines)


def _pool(
    stats: EngineStats | None, owners: Mapping[int, str], hues: Mapping[str, str], room: tuple[int, int]
) -> Content:
    width, rows = room
    if stats is None or not stats.blocks_total:
        return Content("\n").join([_head("KV POOL"), Content.styled("no figures yet", "$foreground-muted")])
    picture = picture_of(stats, width * rows)
    each = f" · {picture.per_cell} per cell" if picture.per_cell > 1 else " blocks"
    held = stats.blocks_used + stats.blocks_cached
    lines = [_head("KV POOL", f"{count(held)} of {count(stats.blocks_total)}{each}")]
    cells = [_cell(owner, owners, hues) for owner in picture.cells]
    lines += [_line(cells[start : start + width]) for start in range(0, len(cells), width)]
    lines.append(_legend(stats, owners))
    return Content("\n").join(lines)


def _line(cells: Sequence[tuple[str, str]]) -> Content:
    """A row of cells. Neighbours that look alike are one span: every span costs when the line is drawn."""
    return Content.assemble(
        *(("".join(mark for mark, _ in run), style) for style, run in groupby(cells, itemgetter(1)))
    )


def _cell(owner: Owner, owners: Mapping[int, str], hues: Mapping[str, str]) -> tuple[str, str]:
    match owner:
        case "shared":
            return "◆", "$foreground bold"
        case "cached":
            return "▪", "$foreground-muted"
        case "free":
            return "·", "$foreground-disabled"
    return "■", hues.get(owners.get(int(owner), ""), _OTHERS)


def _legend(stats: EngineStats, owners: Mapping[int, str]) -> Content:
    counts = counts_of(stats)
    rows = {owner: number for owner, number in counts.items() if not isinstance(owner, str)}
    yours = sum(number for owner, number in rows.items() if owner in owners)
    entries = [
        ("■", "$primary", "yours", yours),
        ("◆", "$foreground bold", "shared", stats.blocks_shared),
        ("■", _OTHERS, "other apps", sum(rows.values()) - yours),
        ("▪", "$foreground-muted", "cached", stats.blocks_cached),
        ("", "", "", 0),
        ("·", "$foreground-muted", "free", stats.blocks_free),
    ]
    lines = []
    for left, right in zip(entries[::2], entries[1::2], strict=True):
        line = Content("")
        for mark, colour, name, number in (left, right):
            text = f" {name:<11}{count(number):<6}" if name else " " * 18
            line = line + Content.assemble((mark or " ", colour), (text, "$foreground-muted"))
        lines.append(line)
    return Content("\n").join(lines)


def _rows(view: View, owners: Mapping[int, str], hues: Mapping[str, str], width: int) -> Content:
    """Everybody's requests, other programs' included."""
    stats = view.stats
    rows = stats.rows if stats else ()
    waiting = f", {stats.num_waiting} waiting" if stats and stats.num_waiting else ""
    lines = [_head("REQUESTS", f"{stats.num_running} running{waiting}" if stats and rows else "none")]
    names = {talk.id: talk.name for talk in view.talks}
    for row in rows[:12]:
        session_id = owners.get(row.request_id)
        name = neutralise(names.get(session_id or "", "another app"))
        figures = _doing(row)
        room = width - len(figures) - 3
        if cell_len(name) > room:
            name = set_cell_size(name, room - 1).rstrip() + "…"
        lines.append(
            Content.assemble(
                ("■ ", hues.get(session_id or "", _OTHERS)),
                (set_cell_size(name, room) + " ", "" if session_id else "$foreground-muted italic"),
                (figures, "$foreground-muted"),
            )
        )
    if len(rows) > 12:
        lines.append(Content.styled(f"and {len(rows) - 12} more", "$foreground-muted"))
    return Content("\n").join(lines)


def _doing(row: RowStats) -> str:
    match row.state:
        case "queued":
            return queued_in_words(row.queue_position)
        case "prefill":
            return f"reading {row.computed_tokens / max(row.prompt_tokens, 1):.0%}"
    return f"{count(row.completion_tokens)} tok · {row.num_blocks} bl"
