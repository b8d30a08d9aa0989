"""The only writer of session state. Owns every session of this screen, the reply each of them is getting and what of
it is saved; knows no widget and draws nothing.

    tracker = Tracker(store, connect, changed)
    talk = tracker.new()
    tracker.send(talk.id, "Hello")          # returns at once; `changed` tells what there is to redraw

Each reply has a task of its own. Text is gathered in the turn as it comes, whether the session is on the screen or
not, and `changed` says so; when to draw it is the screen's business. What writes to the disk does so in a thread: a
locked file may take two seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from enum import Flag, auto
from typing import Any, Protocol

from ..chat.backend import Backend, ModelCard, Reply
from ..chat.messages import Messages
from ..chat.sessions import CONTINUABLE, Message, Session, State
from ..chat.store import CHECKPOINT_S, ReplyDraft, Store
from ..engine.events import Delta
from ..errors import MlxpagedError, Unreachable
from ..sched.requests import FinishReason, SamplingParams
from .state import Phase, Talk, Turn


class Change(Flag):
    """What of a session is to be redrawn."""

    LIST = auto()  # sessions came or went
    TURNS = auto()  # turns came, went or ended
    TEXT = auto()  # the open reply grew, its text or only its count
    PHASE = auto()  # what it is doing
    ENGINE = auto()  # the connection or the model


_THINK = "enable_thinking"
"""Kept among a session's values, but the template's, not the sampler's."""

Say = Callable[[str], None]


class Link(Protocol):
    """A tie to one server, as `chat.attach` makes it."""

    @property
    def backend(self) -> Backend: ...

    @property
    def notice(self) -> str: ...

    async def ready(self, on_status: Say) -> ModelCard: ...

    async def close(self) -> None: ...


Connect = Callable[[Say], Awaitable[Link]]
"""Reaches a server, or starts one, saying meanwhile what it does. Raises MlxpagedError."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What answers, once it can."""

    link: Link
    card: ModelCard

    @property
    def backend(self) -> Backend:
        """Where requests go."""
        return self.link.backend


class Tracker:
    """Every session of this screen. All methods belong to the loop's thread."""

    def __init__(
        self,
        store: Store,
        connect: Connect,
        changed: Callable[[str, Change], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.talks: dict[str, Talk] = {}
        self.engine: Engine | None = None
        self.engine_note = ""
        """What the connection is doing or why there is none; empty once a model answers."""
        self.engine_failed = False
        self._store = store
        self._connect = connect
        self._changed = changed
        self._clock = clock
        self._connecting: asyncio.Task[Engine] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._replies: dict[str, Reply] = {}

    # -- the engine --------------------------------------------------------------------------------------------

    async def ready(self) -> Engine:
        """What answers; connects first where nothing does. Raises MlxpagedError."""
        if self.engine:
            return self.engine
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._reach())
        return await asyncio.shield(self._connecting)

    async def lost(self) -> None:
        """The server went away: the next request connects again."""
        engine, self.engine = self.engine, None
        if engine and not self._replies:  # others may still be reading theirs
            await engine.link.close()

    async def _reach(self) -> Engine:
        link: Link | None = None
        try:
            self._note("looking for a server")
            link = await self._connect(self._note)
            card = await link.ready(self._note)
        except BaseException as error:
            if link:
                await link.close()
            if isinstance(error, MlxpagedError):
                self._note(str(error), failed=True)
            raise
        self.engine = Engine(link, card)
        self._note("")
        return self.engine

    def _note(self, text: str, failed: bool = False) -> None:
        self.engine_note, self.engine_failed = text, failed
        self._changed("", Change.ENGINE)

    # -- sessions ----------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Takes over the list of saved sessions."""
        for saved in await asyncio.to_thread(self._store.sessions):
            self.talks.setdefault(saved.id, _talk_of(saved))
        self._changed("", Change.LIST)

    def new(self, model: str | None = None, system: str | None = None, params: dict[str, float] | None = None) -> Talk:
        """An empty session, first in the list; it is saved with its first message."""
        talk = _talk_of(self._store.create(model, system, params))
        talk.turns, talk.saved = [], False
        self.talks = {talk.id: talk, **self.talks}
        self._changed(talk.id, Change.LIST)
        return talk

    async def look_at(self, session_id: str) -> Talk:
        """The session with its turns, read from the store the first time."""
        talk = self.talks[session_id]
        if talk.turns is None:
            messages = await asyncio.to_thread(self._store.messages, session_id)
            if talk.turns is None:
                talk.turns = [_turn_of(message) for message in messages]
                talk.phase = _phase_after(talk)
        self.seen(session_id)
        return talk

    def seen(self, session_id: str) -> None:
        """The person has what is new of a session on the screen."""
        talk = self.talks[session_id]
        if talk.unseen:
            talk.unseen = False
            self._changed(session_id, Change.PHASE)

    async def fork(self, session_id: str, turn_id: str | None = None) -> Talk:
        """A new session with the turns up to and with `turn_id`; their K/V blocks are shared by the engine."""
        new = await asyncio.to_thread(self._store.fork, session_id, turn_id)
        talk = _talk_of(new)
        self.talks = {talk.id: talk, **self.talks}
        self._changed(talk.id, Change.LIST)
        return await self.look_at(talk.id)

    async def put_away(self, session_id: str) -> None:
        """Takes a session off the list; a saved one stays in the store."""
        await self._quiet(session_id)
        await asyncio.to_thread(self._store.release, session_id)
        self.talks.pop(session_id, None)
        self._changed(session_id, Change.LIST)

    async def rename(self, session_id: str, title: str) -> None:
        """Gives a session a title."""
        self.talks[session_id].title = " ".join(title.split())
        await asyncio.to_thread(self._store.rename, session_id, title)
        self._changed(session_id, Change.PHASE)

    async def remove(self, session_id: str) -> None:
        """Deletes a session for good; its reply is stopped first. Raises SessionBusy."""
        await self._quiet(session_id)
        await asyncio.to_thread(self._store.remove, session_id)
        self.talks.pop(session_id, None)
        self._changed(session_id, Change.LIST)

    async def set_system(self, session_id: str, text: str | None) -> None:
        """The system message from now on."""
        await self._claim(self.talks[session_id])
        self.talks[session_id].system = text
        await asyncio.to_thread(self._store.set_system, session_id, text)

    async def set_params(self, session_id: str, params: dict[str, float]) -> None:
        """The sampling values from now on. Raises BadParameter when one is out of range."""
        _sampling(ModelCard(""), replace(self.talks[session_id], params=params))
        await self._claim(self.talks[session_id])
        self.talks[session_id].params = params
        await asyncio.to_thread(self._store.set_params, session_id, params)
        self._changed(session_id, Change.PHASE)

    def export(self, session_id: str, kind: str) -> str:
        """The session as markdown ("md") or JSON ("json")."""
        return self._store.export(session_id, kind)

    @property
    def problem(self) -> str | None:
        """Why nothing is saved at the moment, in one line."""
        return self._store.problem

    async def search(self, text: str) -> list[tuple[str, str, str]]:
        """(session id, title, the turn's text) of every session with `text` in a turn or its title."""
        wanted = text.casefold()
        found = await asyncio.to_thread(self._store.search, text)
        hits = [(session.id, session.title, message.content) for session, message in found]
        known = {session_id for session_id, _, _ in hits}
        titled = [talk for talk in self.talks.values() if wanted in talk.name.casefold() and talk.id not in known]
        return [(talk.id, talk.name, "") for talk in titled] + [hit for hit in hits if hit[0] in self.talks]

    # -- turns -------------------------------------------------------------------------------------------------

    async def send(self, session_id: str, text: str) -> None:
        """Saves the person's turn and has it answered. Raises SessionBusy."""
        talk = await self.look_at(session_id)
        await self._claim(talk)
        asked = await asyncio.to_thread(self._store.ask, session_id, text)
        assert talk.turns is not None
        talk.turns.append(_turn_of(asked))
        talk.title = talk.title or (await asyncio.to_thread(self._store.session, session_id)).title
        talk.saved = True
        await self._answer(talk)

    async def retry(self, session_id: str, turn_id: str | None = None) -> None:
        """Makes a reply again: the one `turn_id`, the one to that turn, or the last."""
        talk = await self._idle(session_id)
        turns = talk.turns or []
        index = next((i for i, turn in enumerate(turns) if turn.id == turn_id), len(turns) - 1)
        if index >= 0 and turns[index].role == "assistant":
            index -= 1
        if index < 0:
            return
        await self._cut(talk, index + 1)
        await self._answer(talk)

    async def take_back(self, session_id: str, turn_id: str | None = None) -> str:
        """Removes a turn of the person's (None: the last) and all after it; its text."""
        talk = await self._idle(session_id)
        turns = talk.turns or []
        mine = [i for i, turn in enumerate(turns) if turn.role == "user" and turn_id in {None, turn.id}]
        if not mine:
            return ""
        text = turns[mine[-1]].text
        await self._cut(talk, mine[-1])
        return text

    async def edit(self, session_id: str, turn_id: str, text: str) -> None:
        """Writes a turn of the person's anew and has it answered; the old ones stay in the store."""
        await self.take_back(session_id, turn_id)
        await self.send(session_id, text)

    async def clear(self, session_id: str) -> None:
        """Forgets every turn of a session."""
        await self._cut(await self._idle(session_id), 0)

    async def go_on(self, session_id: str) -> None:
        """Continues the last reply where it broke off."""
        talk = await self._idle(session_id)
        last = talk.turns[-1] if talk.turns else None
        if last is None or last.role != "assistant" or last.state not in CONTINUABLE:
            return
        draft = await asyncio.to_thread(self._store.resume, last.id)
        last.state, last.error = "streaming", None
        self._begin(talk, self._reply(talk, last, draft, goes_on=bool(last.text)))

    def stop(self, session_id: str) -> None:
        """Stops the reply; what came of it stays."""
        if reply := self._replies.get(session_id):
            reply.cancel()
        elif task := self._tasks.get(session_id):
            task.cancel()

    async def close(self) -> str | None:
        """Stops every reply and saves. The file unsaved sessions were rescued to, if any."""
        for session_id in list(self._tasks):
            self.stop(session_id)
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=2.0)
        if self._connecting:
            self._connecting.cancel()
        if self.engine:
            with suppress(MlxpagedError, OSError):
                await self.engine.link.close()
        rescued = await asyncio.to_thread(self._store.close)
        return str(rescued) if rescued else None

    # -- one reply ---------------------------------------------------------------------------------------------

    async def _answer(self, talk: Talk) -> None:
        """Begins the reply to the last turn."""
        model = self.engine.card.name if self.engine else None
        draft = await asyncio.to_thread(self._store.reply, talk.id, model)
        turn = Turn(draft.id, "assistant", "", state="streaming")
        assert talk.turns is not None
        talk.turns.append(turn)
        self._begin(talk, self._reply(talk, turn, draft))

    def _begin(self, talk: Talk, reply: Coroutine[Any, Any, None]) -> None:
        talk.phase, talk.progress, talk.num_tokens = Phase.WAITING, None, 0
        talk.rate.clear()
        task = asyncio.create_task(reply)
        self._tasks[talk.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(talk.id, None))
        self._changed(talk.id, Change.TURNS | Change.PHASE)

    async def _reply(self, talk: Talk, turn: Turn, draft: ReplyDraft, goes_on: bool = False) -> None:
        """From the request to the end of the reply, whatever that is."""
        last = Delta(finish=FinishReason.CANCELLED)
        try:
            self._replies[talk.id] = reply = await self._started(talk, _prompt(talk, turn, goes_on))
            self._turn_to(talk, Phase.QUEUED)
            last = await self._read(talk, turn, draft, reply)
        except asyncio.CancelledError:
            pass
        except MlxpagedError as error:
            if isinstance(error, Unreachable):
                await self.lost()
                self._note(str(error), failed=True)
            last = Delta(finish=FinishReason.ERROR, error=str(error))
        finally:
            self._replies.pop(talk.id, None)
        await self._end(talk, turn, draft, last)

    async def _started(self, talk: Talk, messages: Messages) -> Reply:
        """The reply on its way; a server that went away meanwhile is looked for, or started, once more."""
        engine = await self.ready()
        try:
            return await engine.backend.start(messages, _sampling(engine.card, talk))
        except Unreachable:
            await self.lost()
        engine = await self.ready()
        return await engine.backend.start(messages, _sampling(engine.card, talk))

    async def _read(self, talk: Talk, turn: Turn, draft: ReplyDraft, reply: Reply) -> Delta:
        last = Delta(finish=FinishReason.CANCELLED)
        saving = asyncio.create_task(_checkpoints(turn, draft))
        try:
            async for delta in reply:
                last = delta
                self._take(talk, turn, delta)
        finally:
            saving.cancel()
            await asyncio.wait([saving])
        return last

    def _take(self, talk: Talk, turn: Turn, delta: Delta) -> None:
        if delta.progress and not talk.num_tokens:
            talk.progress = delta.progress
            self._turn_to(talk, Phase.READING if delta.progress.computed else Phase.QUEUED)
        if delta.token_ids:
            talk.num_tokens += len(delta.token_ids)
            talk.rate.add(self._clock(), len(delta.token_ids))
            if talk.phase is not Phase.WRITING:
                self._turn_to(talk, Phase.WRITING)
        turn.text += delta.text
        if delta.text or delta.token_ids:
            self._changed(talk.id, Change.TEXT)

    async def _end(self, talk: Talk, turn: Turn, draft: ReplyDraft, last: Delta) -> None:
        """Keeps the reply as it is; one that never began says why in its place."""
        state: State = "done"
        if last.finish is FinishReason.ERROR:
            state, turn.error = "error", last.error or "the reply broke off"
        elif last.finish is FinishReason.CANCELLED:
            state = "stopped"
        await asyncio.to_thread(draft.feed, turn.text[len(draft.text) :])
        turn.state, turn.usage, turn.timing = state, last.usage, last.timing
        turn.finish = str(last.finish) if last.finish else None
        await asyncio.to_thread(draft.finish, state, last.usage, last.timing, turn.error)
        talk.updated = time.time()
        talk.progress = None
        talk.unseen = True  # the screen takes it back for the session it shows
        self._turn_to(talk, _phase_after(talk), Change.TURNS)

    def _turn_to(self, talk: Talk, phase: Phase, more: Change = Change.PHASE) -> None:
        talk.phase = phase
        self._changed(talk.id, more | Change.PHASE)

    # -- helpers -----------------------------------------------------------------------------------------------

    async def _claim(self, talk: Talk) -> None:
        if talk.saved:
            await asyncio.to_thread(self._store.claim, talk.id)
            talk.busy = False

    async def _idle(self, session_id: str) -> Talk:
        """The session, ours and without a reply on its way."""
        talk = await self.look_at(session_id)
        await self._claim(talk)
        await self._quiet(session_id)
        return talk

    async def _quiet(self, session_id: str) -> None:
        if task := self._tasks.get(session_id):
            self.stop(session_id)
            await asyncio.wait([task])

    async def _cut(self, talk: Talk, count: int) -> None:
        """Keeps the first `count` turns."""
        turns = talk.turns or []
        await asyncio.to_thread(self._store.rewind, talk.id, turns[count - 1].id if count else None)
        talk.turns = turns[:count]
        talk.phase = _phase_after(talk)
        self._changed(talk.id, Change.TURNS | Change.PHASE)


async def _checkpoints(turn: Turn, draft: ReplyDraft) -> None:
    """Puts what came of a reply on disk every second, also while nothing comes."""
    while True:
        await asyncio.sleep(CHECKPOINT_S)
        more = turn.text[len(draft.text) :]
        if more:
            feeding = asyncio.ensure_future(asyncio.to_thread(draft.feed, more))
            try:
                await asyncio.shield(feeding)
            except asyncio.CancelledError:  # a thread cannot be stopped half-way
                await feeding
                raise


def _talk_of(saved: Session) -> Talk:
    return Talk(
        saved.id,
        saved.title,
        saved.model,
        saved.system,
        dict(saved.params),
        saved.parent,
        saved.updated,
        phase=Phase.INTERRUPTED if saved.interrupted else Phase.IDLE,
        busy=saved.busy,
    )


def _turn_of(message: Message) -> Turn:
    text = f"<think>{message.reasoning}</think>{message.content}" if message.reasoning else message.content
    return Turn(message.id, message.role, text, message.state, message.error, message.usage, message.timing)


def _phase_after(talk: Talk) -> Phase:
    """What a session without a running reply shows: how its last turn ended."""
    last = talk.turns[-1] if talk.turns else None
    states = {"stopped": Phase.STOPPED, "error": Phase.ERROR, "interrupted": Phase.INTERRUPTED}
    return states.get(last.state, Phase.IDLE) if last else Phase.IDLE


def _prompt(talk: Talk, reply: Turn, goes_on: bool) -> Messages:
    """The conversation up to the reply, which is part of it only when it goes on. A reply that came to nothing is
    left out."""
    turns = list(talk.turns or [])
    before = turns[: turns.index(reply) + goes_on]
    said = [{"role": turn.role, "content": turn.text} for turn in before if turn.text]
    system = [{"role": "system", "content": talk.system}] if talk.system else []
    extra = {_THINK: bool(talk.params[_THINK])} if _THINK in talk.params else {}
    return Messages((*system, *said), extra, add_generation_prompt=not goes_on, continue_final_message=goes_on)


def _sampling(card: ModelCard, talk: Talk) -> SamplingParams:
    """The session's own values over the model's."""
    known = {field.name for field in fields(SamplingParams)}
    own: dict[str, Any] = {
        name: int(value) if name == "top_k" else value for name, value in card.defaults.items() if name in known
    }
    return SamplingParams(**{**own, **{name: value for name, value in talk.params.items() if name != _THINK}})
