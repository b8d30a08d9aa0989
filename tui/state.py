"""What the screen knows of sessions. Owns the shape of that knowledge and its words; only the tracker changes it,
widgets read it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ..chat.sessions import Message, Session
from ..engine.events import Progress, Timing, Usage

RATE_SPAN_S = 2.0
"""The tokens per second shown are those of this many last seconds."""


class Phase(StrEnum):
    """What a session is doing, or how its last reply ended."""

    IDLE = "idle"
    WAITING = "waiting"
    QUEUED = "queued"
    READING = "reading"
    WRITING = "writing"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    ERROR = "error"

    @property
    def is_live(self) -> bool:
        """Whether a reply is being made."""
        return self in {Phase.WAITING, Phase.QUEUED, Phase.READING, Phase.WRITING}


SYMBOLS: Mapping[Phase, str] = {
    Phase.IDLE: "✓",
    Phase.WAITING: "◌",
    Phase.QUEUED: "○",
    Phase.READING: "◐",
    Phase.WRITING: "●",
    Phase.STOPPED: "■",
    Phase.INTERRUPTED: "‖",
    Phase.ERROR: "!",
}


_ENDINGS: Mapping[str, Phase] = {
    "stopped": Phase.STOPPED,
    "error": Phase.ERROR,
    "interrupted": Phase.INTERRUPTED,
}


@dataclass(slots=True)
class Turn:
    """One message as it is shown. `state` is the store's: streaming, done, cut, stopped, interrupted or error."""

    id: str
    role: str
    text: str
    state: str = "done"
    error: str | None = None
    usage: Usage | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """What the app was started with: the system message of its new sessions, and sampling values. Those hold for every
    session while the app runs, under what is set in a session, and are kept in none."""

    system: str | None = None
    params: Mapping[str, float] = field(default_factory=dict)


class Rate:
    """Tokens per second over the last moments."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now: float, count: int) -> None:
        """`count` tokens arrived at `now` (seconds, any origin)."""
        self._seen.append((now, count))
        while now - self._seen[0][0] > RATE_SPAN_S:
            self._seen.popleft()

    def clear(self) -> None:
        """A new reply begins."""
        self._seen.clear()

    @property
    def per_s(self) -> float:
        """Tokens per second; 0 until two arrivals are known."""
        if len(self._seen) < 2 or (span := self._seen[-1][0] - self._seen[0][0]) <= 0:
            return 0.0
        return sum(count for _, count in list(self._seen)[1:]) / span


@dataclass(slots=True)
class Talk:
    """A session as the screen knows it. `turns` is None until it was looked at. `unseen`: something was finished
    while another session was on the screen. `saved`: it is in the store; an untouched new one is not. `draft`: what is
    half written for it, as the prompt shows it."""

    id: str
    title: str = ""
    model: str | None = None
    system: str | None = None
    params: dict[str, float] = field(default_factory=dict)
    parent: str | None = None
    updated: float = 0.0
    turns: list[Turn] | None = None
    phase: Phase = Phase.IDLE
    progress: Progress | None = None
    num_tokens: int = 0
    rate: Rate = field(default_factory=Rate)
    unseen: bool = False
    busy: bool = False
    saved: bool = True
    draft: str = ""

    @property
    def name(self) -> str:
        """The title, or what stands for it."""
        return self.title or "New session"

    @property
    def last_usage(self) -> Usage | None:
        """The counts of the newest reply that has any."""
        return next((turn.usage for turn in reversed(self.turns or []) if turn.usage), None)

    @property
    def context_used(self) -> int:
        """Tokens of the context that the session fills, as far as the engine has told."""
        if self.phase.is_live and self.progress:
            return self.progress.total + self.num_tokens
        usage = self.last_usage
        return usage.prompt_tokens + usage.completion_tokens if usage else 0

    def turn(self, turn_id: str) -> Turn:
        """The turn of that id; LookupError when there is none."""
        return next(turn for turn in self.turns or [] if turn.id == turn_id)


def talk_of(saved: Session) -> Talk:
    """A session of the store, its turns not looked at."""
    return Talk(
        saved.id,
        saved.title,
        saved.model,
        saved.system,
        dict(saved.params),
        saved.parent,
        saved.updated,
        phase=Phase.IDLE if saved.busy else _ENDINGS.get(saved.last_state, Phase.IDLE),
        busy=saved.busy,
    )


def turn_of(message: Message) -> Turn:
    """A message of the store."""
    text = f"<think>{message.reasoning}</think>{message.content}" if message.reasoning else message.content
    return Turn(message.id, message.role, text, message.state, message.error, message.usage, message.timing)


def phase_after(talk: Talk) -> Phase:
    """What a session without a running reply shows: how its last turn ended."""
    last = talk.turns[-1] if talk.turns else None
    return _ENDINGS.get(last.state, Phase.IDLE) if last else Phase.IDLE


def queued_in_words(ahead: int | None) -> str:
    """A request that waits, and for how many others, where the engine tells."""
    if ahead is None:
        return "queued"
    return f"queued, {ahead} ahead" if ahead else "queued, next"


def in_words(talk: Talk) -> str:
    """What a session is doing, in a word or two and without its symbol."""
    match talk.phase:
        case Phase.WRITING:
            return f"{talk.rate.per_s:.0f} tok/s" if talk.rate.per_s else "writing"
        case Phase.READING if talk.progress and talk.progress.total:
            return f"reading {talk.progress.computed / talk.progress.total:.0%}"
        case Phase.QUEUED if talk.progress:
            return queued_in_words(talk.progress.queue_position)
        case Phase.WAITING:
            return "waiting for the model"
        case Phase.IDLE if talk.busy:
            return "open elsewhere"
        case Phase.IDLE if not talk.saved:
            return "new"
        case Phase.IDLE if talk.unseen:
            return "done, unread"
    return str(talk.phase)
