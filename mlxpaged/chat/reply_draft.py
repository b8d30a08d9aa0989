"""One reply on its way into the session file. Owns what has come of it and when that is written; the store writes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..engine.events import Timing, Usage
from .sessions import Message, State

if TYPE_CHECKING:
    from .store import Store

CHECKPOINT_S = 1.0
"""How much of a reply, in seconds, the end of a process may cost."""


class ReplyDraft:
    """One reply on its way in. `feed` what comes, `tick` now and then, `finish` at its end, whatever that is."""

    def __init__(self, store: Store, message: Message) -> None:
        self._store = store
        self._message = message
        self._pieces = [message.content]
        self._thoughts = [message.reasoning]
        self._dirty = False
        self._next = store.ticks() + CHECKPOINT_S

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
        if self._dirty and self._store.ticks() >= self._next:
            self._next = self._store.ticks() + CHECKPOINT_S
            self._dirty = False
            self._store.save(self._now())

    def finish(
        self, state: State, usage: Usage | None = None, timing: Timing | None = None, error: str | None = None
    ) -> Message:
        """The reply as it stays: "done", "cut" at its longest, "stopped" by the person, or "error" with the reason."""
        self._message = replace(self._now(), state=state, usage=usage, timing=timing, error=error)
        self._store.save(self._message)
        return self._message

    def drop(self) -> None:
        """Nothing came: the turn before is the last one again."""
        self._store.rewind(self._message.session, self._message.parent)
        self._store.save(replace(self._now(), state="stopped"))

    def _now(self) -> Message:
        return replace(self._message, content="".join(self._pieces), reasoning="".join(self._thoughts))
