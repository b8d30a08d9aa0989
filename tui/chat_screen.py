"""The screen with everything on it. Owns which session is shown and what widgets' words lead to; session state is the
tracker's, and the frames say when to draw."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import ActiveBinding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Footer

from ..errors import MlxpagedError
from .bars import HintBar, TitleBar, hint_of
from .changes import Change
from .commands import command_of, is_command, unescaped
from .deeds import Deeds
from .details import Details, View
from .frames import Frames
from .keymap import NO_KEY, Keys
from .keys import FIRST_SESSIONS, bound
from .looks import Interest, Looks
from .messages import Choose, CopyText, Edit, Fork, GoOn, Retry, Send, Tell, Uncovered
from .panes import ROOM_FROM, SIDEBAR_FROM, Panes
from .prompt import Prompt
from .sidebar import Sidebar
from .stage import Stage
from .state import Talk
from .tracker import Tracker
from .transcript import Transcript


class ChatScreen(Deeds, Screen[None]):
    """Sessions, conversation, prompt, engine."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bound("stop", "escape", priority=True),
        bound("new_session", "do('new')", "new", priority=True),
        bound("close_session", "close_if_empty"),
        bound("next_session", "step(1)", priority=True),
        bound("previous_session", "step(-1)", priority=True),
        bound("commands", "app.command_palette", "commands", priority=True),
        bound("retry", "do('retry')", priority=True),
        bound("copy_code", "do('copy')", priority=True),
        bound("search", "do('search')", "search", priority=True),
        bound("sessions", "do('sessions')", "sessions", priority=True),
        bound("engine", "do('stats')", "engine", priority=True),
        bound("help", "do('help')", "keys", priority=True),
        bound("thinking", "do('think')", priority=True),
        bound("editor", "editor", priority=True),
        bound("open_pasted", "open_chips", priority=True),
        bound("interrupt", "interrupt", priority=True),
        bound("leave", "do('bye')", priority=True),
        bound("leave_empty", "leave_if_empty"),
        bound("mark_up", "mark(-1)", priority=True),
        bound("mark_down", "mark(1)", priority=True),
        bound("page_up", "page(-1)", priority=True),
        bound("page_down", "page(1)", priority=True),
        *(bound(f"session_{n}", f"go({n})", priority=True) for n in FIRST_SESSIONS),
    ]
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012 - the base class declares it so
        (0, "-tiny"),
        (60, "-narrow"),
        (SIDEBAR_FROM, "-wide"),
    ]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (15, "-tall")]  # noqa: RUF012

    def __init__(self, tracker: Tracker, first: str, keys: Keys) -> None:
        super().__init__()
        self.tracker = tracker
        self.keys = keys
        self.chosen = first
        self.frames = Frames(self, lambda: self.chosen, self._draw)
        self._sidebar, self._details = Sidebar(), Details()
        self._panes = Panes({"sidebar": self._sidebar, "details": self._details})
        self.editing: str | None = None
        interest = Interest(
            shown=lambda: self._details.display,
            engine=lambda: tracker.connection_of(self.talk).engine or tracker.connections.first.engine,
            busy=lambda: any(talk.phase.is_live for talk in self.talks),
        )
        self._looks = Looks(self, interest, self._draw_details)
        self._told: str | None = None
        self._one_at_a_time = asyncio.Lock()

    def compose(self) -> ComposeResult:
        yield TitleBar()
        with Horizontal(id="middle"):
            yield self._sidebar
            with Vertical(id="centre"):
                yield Stage(self.keys)
                yield HintBar()
                yield Prompt(self.keys)
            yield self._details
        yield Footer(show_command_palette=False)

    async def on_mount(self) -> None:
        self.query_one(HintBar).show(None)
        self._arrange()
        self.prompt.focus()
        await self.show_session(self.chosen)

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        """What the footer shows: not what has no key."""
        return {key: binding for key, binding in super().active_bindings.items() if key != NO_KEY}

    # -- what is there -----------------------------------------------------------------------------------------

    @property
    def talks(self) -> list[Talk]:
        """Every session, in the order of the list."""
        return list(self.tracker.talks.values())

    @property
    def talk(self) -> Talk:
        """The session on the screen."""
        return self.tracker.talks[self.chosen]

    @property
    def prompt(self) -> Prompt:
        """Where the person writes."""
        return self.query_one(Prompt)

    @property
    def transcript(self) -> Transcript:
        """The turns on the screen."""
        transcript = self._stage.transcript_of(self.chosen)
        assert transcript
        return transcript

    @property
    def _stage(self) -> Stage:
        return self.query_one(Stage)

    # -- drawing -----------------------------------------------------------------------------------------------

    async def _draw(self, dirty: Mapping[str, Change], counts: bool) -> None:
        for session_id, change in dirty.items():
            talk = self.tracker.talks.get(session_id)
            if talk and change & Change.TURNS and talk.unseen:
                self._ended(talk)
        if counts:
            self._draw_bars()
        if dirty.get("", Change(0)) & Change.ENGINE:
            self._looks.soon()
        if any(change != Change.TEXT for change in dirty.values()):
            self._draw_details()
        mine = dirty.get(self.chosen, Change(0))
        if mine & (Change.TURNS | Change.TEXT | Change.PHASE) and self._stage.transcript_of(self.chosen):
            await self.transcript.bring_up_to_date(counts)

    def _draw_bars(self) -> None:
        talks, connection = self.talks, self.tracker.connection_of(self.talk)
        self._sidebar.show(talks, self.chosen, self.tracker.models())
        model = connection.engine.card.name if connection.engine else connection.model
        self.query_one(TitleBar).show(self.talk, talks, model, connection.note, connection.failed)
        self._draw_hint()
        if self.tracker.problem != self._told:
            self._told = self.tracker.problem
            if self._told:
                self.notify(self._told, title="Not saved", severity="warning", timeout=15, markup=False)

    def _ended(self, talk: Talk) -> None:
        """A reply is complete: seen here, or worth a bell."""
        if talk.id == self.chosen:
            self.tracker.seen(talk.id)
        else:
            self.app.bell()

    def _draw_hint(self) -> None:
        engine = self.tracker.connection_of(self.talk).engine
        context_len = engine.card.context_len if engine else None
        hint = hint_of(self.talk, self.prompt.text, bool(self.editing), context_len, self.keys)
        self.query_one(HintBar).show(hint)

    def _draw_details(self) -> None:
        if not self._details.display:
            return
        engine = self.tracker.connection_of(self.talk).engine
        card = engine.card if engine else None
        given, stats = self.tracker.given.params, self._looks.stats
        self._details.show(View(self.talk, self.talks, card, given, stats, list(self._looks.rates.values)))

    # -- sessions ----------------------------------------------------------------------------------------------

    async def show_session(self, session_id: str) -> None:
        """Puts a session on the screen; what was being written for the other stays with it."""
        async with self._one_at_a_time:
            if session_id in self.tracker.talks:
                await self._show(session_id)

    async def _show(self, session_id: str) -> None:
        talk = await self.tracker.look_at(session_id)
        self.editing = None
        if self.chosen != session_id:
            self.write_down()
            self.chosen = session_id
            self.prompt.put(talk.draft)
        elif talk.draft and not self._stage.transcript_of(session_id):
            self.prompt.give_back(talk.draft)  # the first session: something may be typed already
        await self._stage.show(talk, self.tracker.talks)
        self.write_down()
        self.prompt.remember([turn.text for turn in talk.turns or [] if turn.role == "user"])
        self.frames.changed(session_id, Change.TURNS | Change.PHASE)

    def write_down(self) -> None:
        """Keeps what is in the prompt as the session's draft, once the session is there."""
        if self._stage.transcript_of(self.chosen):
            self.tracker.write_down(self.chosen, self.prompt.text, self.prompt.written)

    def on_choose(self, event: Choose) -> None:
        self.attempt(self.show_session(event.session_id))

    # -- what widgets say --------------------------------------------------------------------------------------

    async def on_send(self, event: Send) -> None:
        text = event.text
        if is_command(text):
            found = command_of(text)
            if found is None:
                self.prompt.give_back(text)
                self.tell(f"there is no {text.split()[0]}; /help lists the commands, // sends such a text", severe=True)
                return
            self.do(*found)
            return
        if self.talk.phase.is_live:
            self.prompt.give_back(text)
            stop, new = self.keys.hint("stop", "/stop"), self.keys.hint("new_session", "/new")
            self.tell(f"this session is still answering; {stop} stops it, {new} opens another")
            return
        self.attempt(self._send(unescaped(text), self.editing))

    async def _send(self, text: str, editing: str | None) -> None:
        session_id = self.chosen
        self.editing = None
        try:
            if editing:
                await self.tracker.edit(session_id, editing, text)
            else:
                await self.tracker.send(session_id, text)
        except MlxpagedError:
            if session_id == self.chosen:
                self.prompt.give_back(text)
            else:
                self.tracker.write_down(session_id, text, text)
            raise
        self.prompt.remember([turn.text for turn in self.talk.turns or [] if turn.role == "user"])
        self.transcript.action_follow()

    def on_prompt_grew(self, event: Prompt.Grew) -> None:
        self.write_down()  # not the event's text, which may be that of a session that was left since
        self._draw_hint()

    def on_copy_text(self, event: CopyText) -> None:
        self.app.copy_to_clipboard(event.text)
        self.notify(f"{event.what} was copied.", timeout=2, markup=False)

    def on_tell(self, event: Tell) -> None:
        self.tell(event.text, event.severe)

    def on_fork(self, event: Fork) -> None:
        self.attempt(self.fork_at(event.turn_id))

    def on_retry(self, event: Retry) -> None:
        self.attempt(self.tracker.retry(self.chosen, event.turn_id))

    def on_edit(self, event: Edit) -> None:
        self.begin_edit(event.turn_id)

    def on_go_on(self, event: GoOn) -> None:
        self.attempt(self.tracker.go_on(self.chosen))

    # -- size --------------------------------------------------------------------------------------------------

    def on_resize(self, event: events.Resize) -> None:
        self._arrange()

    def on_screen_resume(self) -> None:
        self.post_message(Uncovered())

    def on_app_blur(self) -> None:
        self._looks.away = True

    def on_app_focus(self) -> None:
        self._looks.away = False

    def toggle(self, pane: str) -> None:
        """Shows or hides a pane ("sidebar" or "details") from now on, whatever the size."""
        self._panes.toggle(pane)
        self._arrange()
        if self._panes.lacks_room(pane, self.app.size):
            self.tell(f"That needs {ROOM_FROM[pane]} columns; this window has {self.app.size.width}.")

    def _arrange(self) -> None:
        self.set_class(self._panes.arrange(self.app.size), "-bare")
        self._looks.soon()
