"""The list of sessions. Owns how a session looks in a line or two; knows nothing of replies or engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from ..chat.foreign import neutralise
from .messages import Choose
from .state import SYMBOLS, Phase, Talk, in_words
from .steady import Steady
from .themes import hue_of

_COLOURS = {
    Phase.WAITING: "$foreground-muted",
    Phase.QUEUED: "$foreground-muted",
    Phase.READING: "$warning",
    Phase.WRITING: "$success",
    Phase.STOPPED: "$foreground-muted",
    Phase.INTERRUPTED: "$warning",
    Phase.ERROR: "$error",
}
_HALF_WRITTEN = "✎"

_FORK = " (fork)"
"""How the title of a fork ends, until it is renamed."""


class Sidebar(Vertical):
    """All sessions, the newest first; the chosen one is marked."""

    def __init__(self) -> None:
        super().__init__()
        self._list = SessionList()
        self._head = Steady("pane-head")
        self._shown: dict[str, Content] = {}
        self._count = -1

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._list

    def show(self, talks: Sequence[Talk], chosen: str | None, models: Mapping[str, str]) -> None:
        """Draws what has changed since the last time. `models`: session id -> model, where that is to be shown."""
        lines = {
            talk.id: _lines(talk, position, models.get(talk.id, ""), talk.id != chosen)
            for position, talk in enumerate(talks)
        }
        if list(lines) != list(self._shown):
            self._list.clear_options()
            self._list.add_options(Option(prompt, id=session_id) for session_id, prompt in lines.items())
        else:
            for session_id, prompt in lines.items():
                if not prompt.is_same(self._shown[session_id]):
                    self._list.replace_option_prompt(session_id, prompt)
        self._shown = lines
        live = sum(talk.phase.is_live for talk in talks)
        head = Content.assemble(("SESSIONS", "$foreground-muted bold"), (f"  {live} live" if live else "", "$success"))
        self._head.say(head)
        if chosen in lines:
            self._list.choose(list(lines).index(chosen))


class SessionList(OptionList):
    """The rows. Moving the mark picks the session at once."""

    def __init__(self) -> None:
        super().__init__(compact=True)
        self._told: int | None = None

    def choose(self, index: int) -> None:
        """Moves the mark without telling anyone."""
        if self.highlighted != index:
            self._told = index
            self.highlighted = index

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        told, self._told = self._told, None
        if event.option_index != told and event.option_id and self.has_focus:
            self.post_message(Choose(event.option_id))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option_id:
            self.post_message(Choose(event.option_id))


def _lines(talk: Talk, position: int, model: str, is_hidden: bool) -> Content:
    """Two lines: the name behind a mark in the session's own hue, and what it is doing and which model answers. That it
    is a fork, or `is_hidden` with something half written, is said in the second, for the end of a long name is not
    seen."""
    name = " ".join(neutralise(talk.name).split())
    forked = name.endswith(_FORK)
    model = model.rstrip("/").rpartition("/")[2]  # the end of it differs most
    colour = "$accent" if talk.unseen and talk.phase is Phase.IDLE else _COLOURS.get(talk.phase, "$foreground-disabled")
    weight = "bold" if talk.unseen or talk.phase.is_live else ""
    return Content.assemble(
        ("▎", hue_of(position)),
        (f"{name.removesuffix(_FORK)}\n", weight),
        ("▎", hue_of(position)),
        (f"{SYMBOLS[talk.phase]} ", colour),
        (in_words(talk), colour),
        (f" · {_HALF_WRITTEN}" if talk.draft and is_hidden else "", "$warning"),
        (" · fork" if forked else "", "$foreground-muted"),
        (f" · {neutralise(model)}" if model else "", "$foreground-muted"),
    )
