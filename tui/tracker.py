"""The only writer of session state. Owns every session of this screen and what of it is saved; knows no widget and
draws nothing.

    tracker = Tracker(store, connect, changed)
    talk = tracker.new()
    tracker.send(talk.id, "Hello")          # returns at once; `changed` tells what there is to redraw

When to draw is the screen's business. What writes to the disk does so in a thread: a locked file may take two seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..chat.backend import ModelCard
from ..chat.sessions import CONTINUABLE, State
from ..chat.store import Store
from .answers import Answers, sampling_of
from .changes import Change, Changed
from .connection import Connect, Connection, Connections
from .drafts import Drafts
from .state import Given, Talk, phase_after, talk_of, turn_of


class Tracker:
    """Every session of this screen. All methods belong to the loop's thread."""

    def __init__(
        self,
        store: Store,
        connect: Connect,
        changed: Changed,
        models: Sequence[str] = (),
        given: Given | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.talks: dict[str, Talk] = {}
        self.given = given or Given()
        self.connections = Connections(models, connect, lambda: changed("", Change.ENGINE))
        self._store = store
        self._changed = changed
        self._answers = Answers(store, self.connections, changed, clock, self.given.params)
        self._drafts = Drafts.beside(store.path)

    # -- sessions ----------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Takes over the list of saved sessions."""
        for saved in await asyncio.to_thread(self._store.sessions):
            self.talks.setdefault(saved.id, talk_of(saved))
        for session_id, text in (await self._drafts.texts()).items():
            if session_id in self.talks:
                self.talks[session_id].draft = text
        self._changed("", Change.LIST)

    def new(self, model: str | None = None) -> Talk:
        """An empty session, first in the list; it is saved with its first message. It has nothing of another's."""
        talk = talk_of(self._store.create(model, self.given.system))
        talk.turns, talk.saved = [], False
        self.talks = {talk.id: talk, **self.talks}
        self._changed(talk.id, Change.LIST)
        return talk

    async def take_up(self, model: str | None = None) -> Talk | None:
        """A new session for each text that was being written for one when its app was ended; the newest of them."""
        talk = None
        if not self.problem:
            for old_id, text in await self._drafts.left_behind(self.talks):
                talk = self.new(model)
                self.write_down(talk.id, text, text)
                self._drafts.keep(old_id, "")
        return talk

    def write_down(self, session_id: str, draft: str, whole: str) -> None:
        """What the prompt holds for a session now; `whole`: with pastes in full. Cheap: nothing is waited for."""
        talk = self.talks.get(session_id)
        if talk and talk.draft != draft:
            talk.draft = draft
            self._drafts.keep(session_id, whole, new=not talk.saved)

    def connection_of(self, talk: Talk) -> Connection:
        """Where a session is answered."""
        return self.connections.of(talk.model)

    def models(self) -> dict[str, str]:
        """Session id -> the model that answers it; empty where there are not several to tell apart."""
        if not self.connections.others:
            return {}
        return {talk.id: self.connection_of(talk).model or "" for talk in self.talks.values()}

    async def look_at(self, session_id: str) -> Talk:
        """The session with its turns, read from the store the first time."""
        talk = self.talks[session_id]
        if talk.turns is None:
            messages = await asyncio.to_thread(self._store.messages, session_id)
            draft = await self._drafts.of(session_id)
            if talk.turns is None:
                talk.draft = draft
                talk.turns = [turn_of(message) for message in messages]
                talk.phase = phase_after(talk)
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
        talk = talk_of(new)
        self.talks = {talk.id: talk, **self.talks}
        self._changed(talk.id, Change.LIST)
        return await self.look_at(talk.id)

    async def put_away(self, session_id: str) -> None:
        """Takes a session off the list; a saved one stays in the store."""
        await self._answers.quiet(session_id)
        await asyncio.to_thread(self._store.release, session_id)
        talk = self.talks.pop(session_id, None)
        if talk and not talk.saved:
            self._drafts.keep(session_id, "")
        self._changed(session_id, Change.LIST)

    async def rename(self, session_id: str, title: str) -> None:
        """Gives a session a title."""
        self.talks[session_id].title = " ".join(title.split())
        await asyncio.to_thread(self._store.rename, session_id, title)
        self._changed(session_id, Change.PHASE)

    async def remove(self, session_id: str) -> None:
        """Deletes a session for good; its reply is stopped first. Raises SessionBusy."""
        await self._answers.quiet(session_id)
        await asyncio.to_thread(self._store.remove, session_id)
        self._drafts.keep(session_id, "")
        self.talks.pop(session_id, None)
        self._changed(session_id, Change.LIST)

    async def set_system(self, session_id: str, text: str | None) -> None:
        """The system message from now on."""
        await self._claim(self.talks[session_id])
        self.talks[session_id].system = text
        await asyncio.to_thread(self._store.set_system, session_id, text)

    async def set_params(self, session_id: str, params: dict[str, float]) -> None:
        """The sampling values from now on. Raises BadParameter when one is out of range."""
        sampling_of(ModelCard(""), replace(self.talks[session_id], params=params), self.given.params)
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
        """(session id, title, the turn's text) of every session with `text` in its title or a turn, those first that
        have it in the title only."""
        found = await asyncio.to_thread(self._store.search, text)
        hits = [(session.id, session.title, hit.content if hit else "") for session, hit in found]
        return sorted((hit for hit in hits if hit[0] in self.talks), key=lambda hit: bool(hit[2]))

    # -- turns -------------------------------------------------------------------------------------------------

    async def send(self, session_id: str, text: str) -> None:
        """Saves the person's turn and has it answered. Raises SessionBusy."""
        talk = await self.look_at(session_id)
        await self._claim(talk)
        asked = await asyncio.to_thread(self._store.ask, session_id, text)
        assert talk.turns is not None
        talk.turns.append(turn_of(asked))
        talk.title = talk.title or (await asyncio.to_thread(self._store.session, session_id)).title
        talk.saved = True
        await self._answers.begin(talk)

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
        await self._answers.begin(talk)

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
        await self._answers.go_on(talk, last)

    def stop(self, session_id: str) -> None:
        """Stops the reply; what came of it stays."""
        self._answers.stop(session_id)

    async def close(self, state: State = "stopped") -> str | None:
        """Ends every reply, which is kept as `state`, and saves. The file unsaved sessions were rescued to, if any."""
        await self._answers.close(state)
        await self._drafts.close()
        await self.connections.close()
        rescued = await asyncio.to_thread(self._store.close)
        return str(rescued) if rescued else None

    # -- helpers -----------------------------------------------------------------------------------------------

    async def _claim(self, talk: Talk) -> None:
        if talk.saved:
            await asyncio.to_thread(self._store.claim, talk.id)
            talk.busy = False

    async def _idle(self, session_id: str) -> Talk:
        """The session, ours and without a reply on its way."""
        talk = await self.look_at(session_id)
        await self._claim(talk)
        await self._answers.quiet(session_id)
        return talk

    async def _cut(self, talk: Talk, count: int) -> None:
        """Keeps the first `count` turns."""
        turns = talk.turns or []
        await asyncio.to_thread(self._store.rewind, talk.id, turns[count - 1].id if count else None)
        talk.turns = turns[:count]
        talk.title = (await asyncio.to_thread(self._store.session, talk.id)).title
        talk.phase = phase_after(talk)
        self._changed(talk.id, Change.TURNS | Change.PHASE)
