"""One session's turns on the screen. Owns which turns have widgets, the mark that moves over them and whether the view
follows the end; reads the session, never changes it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.events import Click
from textual.markup import escape
from textual.message import Message
from textual.widgets import Static

from ..chat.foreign import neutralise
from ..chat.sessions import CONTINUABLE
from .figures import figures_of, status_of
from .keymap import Keys
from .keys import bound
from .messages import CopyText, Edit, Fork, GoOn, Retry, Tell
from .reply import ReplyBody, Thought
from .state import Talk, Turn
from .steady import Steady

SHOWN_AT_FIRST = 24
"""Turns that get widgets when a session is opened; earlier ones follow when they are asked for."""

SAID_LINES = 16
"""Lines of the person's own turn that are shown; more were pasted, and the person knows them."""


class Transcript(VerticalScroll):
    """The turns of one session, following the end until the person scrolls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bound("turn_up", "mark(-1)", "turn up"),
        bound("turn_down", "mark(1)"),
        bound("turn_fork", "fork", "fork here"),
        bound("turn_retry", "retry", "retry"),
        bound("turn_edit", "edit", "edit"),
        bound("turn_copy", "copy", "copy"),
        bound("turn_continue", "go_on"),
        bound("turn_first", "scroll_home"),
        bound("turn_last", "follow"),
    ]

    def __init__(self, talk: Talk, keys: Keys) -> None:
        super().__init__()
        self.talk = talk
        self._keys = keys
        self._views: dict[str, TurnView] = {}
        self._first = max(0, len(talk.turns or []) - SHOWN_AT_FIRST)
        self._marked: str | None = None
        self._one_at_a_time = asyncio.Lock()
        self._earlier = Steady("earlier")
        self._welcome = Static(_welcome(keys), classes="welcome")

    def compose(self) -> ComposeResult:
        yield self._welcome
        yield self._earlier

    def on_mount(self) -> None:
        self.anchor()

    async def bring_up_to_date(self, counts: bool = True) -> None:
        """Makes the widgets agree with the session's turns; of a reply that grows only its text, unless `counts`."""
        async with self._one_at_a_time:
            turns = self.talk.turns or []
            self._first = min(self._first, len(turns))
            shown = turns[self._first :]
            self._welcome.display = not turns
            self._earlier.display = self._first > 0
            self._earlier.say(Content(f"↑ {self._first} earlier turns"))
            kept = {turn.id for turn in shown}
            for turn_id in [one for one in self._views if one not in kept]:
                await self._views.pop(turn_id).remove()
            for index, turn in enumerate(shown):
                await self._show(turn, index, counts)

    async def show_earlier(self) -> None:
        """Gives earlier turns their widgets, above the others."""
        self.release_anchor()
        self._first = max(0, self._first - SHOWN_AT_FIRST)
        await self.bring_up_to_date()

    def action_follow(self) -> None:
        """To the end, and on with it."""
        self._mark(None)
        self.anchor()

    async def action_mark(self, step: int) -> None:
        """Moves the mark by `step` turns; beyond the last one it goes away and the view follows the end again."""
        ids = [turn.id for turn in (self.talk.turns or [])[self._first :]]
        if not ids:
            return
        at = ids.index(self._marked) if self._marked in ids else len(ids)
        if at + step < 0:
            if self._first:
                await self.show_earlier()
                await self.action_mark(step)
            return
        if at + step >= len(ids):
            self.action_follow()
            return
        self._mark(ids[at + step])
        self.release_anchor()
        self.scroll_to_widget(self._views[ids[at + step]], animate=False, top=step < 0)

    def action_fork(self) -> None:
        if turn := self._marked_or_last():
            self.post_message(Fork(turn.id))

    def action_retry(self) -> None:
        if turn := self._marked_or_last():
            self.post_message(Retry(turn.id))

    def action_edit(self) -> None:
        turns = self.talk.turns or []
        upto = self._marked_or_last()
        mine = [turn for turn in turns[: turns.index(upto) + 1] if turn.role == "user"] if upto else []
        if mine:
            self.post_message(Edit(mine[-1].id))

    def action_copy(self) -> None:
        if turn := self._marked_or_last():
            self.post_message(CopyText(turn.text, "The turn"))

    def action_go_on(self) -> None:
        turns = self.talk.turns or []
        if self.talk.phase.is_live:
            self.post_message(Tell("This session is still answering."))
        elif turns and turns[-1].role == "assistant" and turns[-1].state in CONTINUABLE:
            self.post_message(GoOn(turns[-1].id))
        else:
            self.post_message(Tell("The last reply is complete; there is nothing to continue."))

    def toggle_thinking(self) -> None:
        """Opens or closes the thinking of every reply."""
        thoughts = list(self.query(Thought))
        shown = not any(thought.is_open for thought in thoughts)
        for thought in thoughts:
            thought.toggle(shown)

    def last_code(self) -> str | None:
        """The last code block on the screen, as its text."""
        blocks = [block for body in self.query(ReplyBody) for block in body.code_blocks]
        return blocks[-1].source if blocks else None

    async def on_click(self, event: Click) -> None:
        if event.widget is self._earlier:
            await self.show_earlier()

    def on_turn_view_clicked(self, event: TurnView.Clicked) -> None:
        event.stop()
        self._mark(None if event.turn_id == self._marked else event.turn_id)

    async def _show(self, turn: Turn, index: int, counts: bool) -> None:
        view = self._views.get(turn.id)
        if view is None:
            view = TurnView(turn, self._keys)
            before = [one for one in self.children if isinstance(one, TurnView)]
            self._views[turn.id] = view
            await self.mount(view, before=before[index] if index < len(before) else None)
            counts = True
        await view.bring_up_to_date(self.talk, counts)

    def _marked_or_last(self) -> Turn | None:
        turns = self.talk.turns or []
        return next((turn for turn in turns if turn.id == self._marked), turns[-1] if turns else None)

    def _mark(self, turn_id: str | None) -> None:
        for one in (self._marked, turn_id):
            if one in self._views:
                self._views[one].set_class(one == turn_id, "-marked")
        self._marked = turn_id


class TurnView(Vertical):
    """One turn: what was said and, under a reply, how it went."""

    @dataclass
    class Clicked(Message):
        """The turn was clicked."""

        turn_id: str

    def __init__(self, turn: Turn, keys: Keys) -> None:
        super().__init__(classes=f"turn -{turn.role}")
        self._keys = keys
        self._turn = turn
        self._body: ReplyBody | Static
        if turn.role == "assistant":
            self._body = ReplyBody()
        else:
            self._body = Static(_shortened(turn.text), classes="said")
        self._foot = Steady("turn-foot")
        self._shown: tuple[int, str] | None = None

    def compose(self) -> ComposeResult:
        yield self._body
        yield self._foot

    async def bring_up_to_date(self, talk: Talk, counts: bool) -> None:
        """Shows what came since the last time; the line under a growing reply only where `counts`."""
        turn = self._turn
        open_ = turn.state == "streaming"
        if counts or not open_:
            foot = status_of(talk, self._keys) if open_ else figures_of(turn, self._keys)
            self._foot.display = bool(foot)
            self._foot.say(foot or Content(""))
        if isinstance(self._body, ReplyBody) and self._shown != (len(turn.text), turn.state):
            if self._body.is_finished:  # a reply that broke off went on
                old, self._body = self._body, ReplyBody()
                await self.mount(self._body, before=old)
                await old.remove()
            self._shown = (len(turn.text), turn.state)
            await self._body.show(turn.text, final=not open_)

    def on_click(self) -> None:
        if not self.screen.selections:
            self.post_message(self.Clicked(self._turn.id))


def _welcome(keys: Keys) -> str:
    """What an empty session says, as markup."""

    def key(name: str, otherwise: str) -> str:
        return f"[$primary]{escape(keys.hint(name, otherwise))}[/]"

    return f"""\
[bold]A new session[/bold]

Write below and press {key("send", "the key for send")}. Every session is answered at the same time:
{key("new_session", "/new")} opens another while this one writes.

{key("help", "/help")} keys   {key("commands", "/")} commands   {key("engine", "/stats")} the engine from inside   \
[$primary]/[/] by name"""


def _shortened(text: str) -> Content:
    """What the person said; of a long paste its beginning."""
    lines = neutralise(text).split("\n")
    if len(lines) <= SAID_LINES + 3:
        return Content("\n".join(lines))
    rest = f"… {len(lines) - SAID_LINES:,} more lines"
    return Content.assemble("\n".join(lines[:SAID_LINES]), (f"\n{rest}", "$foreground-muted italic"))
