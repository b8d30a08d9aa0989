"""The replies that are being made. Owns a task for each, and what of a reply is on disk; a session's other turns are
the tracker's.

Text is gathered in the turn as it comes, whether the session is on the screen or not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import fields
from typing import Any

from ..chat.backend import ModelCard, Reply
from ..chat.messages import Messages
from ..chat.reply_draft import CHECKPOINT_S, ReplyDraft
from ..chat.sessions import State
from ..chat.store import Store
from ..engine.events import Delta
from ..errors import MlxpagedError, Unreachable
from ..sched.requests import FinishReason, SamplingParams
from .changes import Change, Changed
from .connection import Connections
from .state import Phase, Talk, Turn, phase_after

_THINK = "enable_thinking"
"""Kept among a session's values, but the template's, not the sampler's."""


class Answers:
    """At most one reply of each session. All methods belong to the loop's thread."""

    def __init__(
        self,
        store: Store,
        connections: Connections,
        changed: Changed,
        clock: Callable[[], float],
        given: Mapping[str, float],
    ) -> None:
        self._store = store
        self._connections = connections
        self._changed = changed
        self._clock = clock
        self._given = given
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._replies: dict[str, Reply] = {}
        self._when_stopped: State = "stopped"

    async def begin(self, talk: Talk) -> None:
        """Begins the reply to the last turn."""
        engine = self._connections.of(talk.model).engine
        draft = await asyncio.to_thread(self._store.reply, talk.id, engine.card.name if engine else None)
        turn = Turn(draft.id, "assistant", "", state="streaming")
        assert talk.turns is not None
        talk.turns.append(turn)
        self._run(talk, self._reply(talk, turn, draft))

    async def go_on(self, talk: Talk, turn: Turn) -> None:
        """Continues a reply where it broke off."""
        draft = await asyncio.to_thread(self._store.resume, turn.id)
        turn.state, turn.error = "streaming", None
        self._run(talk, self._reply(talk, turn, draft, goes_on=bool(turn.text)))

    def stop(self, session_id: str) -> None:
        """Stops the reply; what came of it stays."""
        if reply := self._replies.get(session_id):
            reply.cancel()
        elif task := self._tasks.get(session_id):
            task.cancel()

    async def quiet(self, session_id: str) -> None:
        """Stops the reply and waits until it has ended."""
        if task := self._tasks.get(session_id):
            self.stop(session_id)
            await asyncio.wait([task])

    async def close(self, state: State) -> None:
        """Ends every reply, which is kept as `state`."""
        self._when_stopped = state
        for session_id in list(self._tasks):
            self.stop(session_id)
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=2.0)

    def _run(self, talk: Talk, reply: Coroutine[Any, Any, None]) -> None:
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
                connection = self._connections.of(talk.model)
                await connection.lost(in_use=bool(self._replies))
                connection.say(str(error), failed=True)
            last = Delta(finish=FinishReason.ERROR, error=str(error))
        finally:
            self._replies.pop(talk.id, None)
        await self._end(talk, turn, draft, last)

    async def _started(self, talk: Talk, messages: Messages) -> Reply:
        """The reply on its way; a server that went away meanwhile is looked for, or started, once more."""
        connection = self._connections.of(talk.model)
        engine = await connection.ready()
        try:
            return await engine.backend.start(messages, sampling_of(engine.card, talk, self._given))
        except Unreachable:
            await connection.lost(in_use=bool(self._replies))
        engine = await connection.ready()
        return await engine.backend.start(messages, sampling_of(engine.card, talk, self._given))

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
            state = self._when_stopped
        elif last.finish is FinishReason.LENGTH:
            state = "cut"
        await asyncio.to_thread(draft.feed, turn.text[len(draft.text) :])
        turn.state, turn.usage, turn.timing = state, last.usage, last.timing
        await asyncio.to_thread(draft.finish, state, last.usage, last.timing, turn.error)
        talk.updated = time.time()
        talk.progress = None
        talk.unseen = True  # the screen takes it back for the session it shows
        self._turn_to(talk, phase_after(talk), Change.TURNS)

    def _turn_to(self, talk: Talk, phase: Phase, more: Change = Change.PHASE) -> None:
        talk.phase = phase
        self._changed(talk.id, more | Change.PHASE)


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


def _prompt(talk: Talk, reply: Turn, goes_on: bool) -> Messages:
    """The conversation up to the reply, which is part of it only when it goes on. A reply that came to nothing is
    left out."""
    turns = list(talk.turns or [])
    before = turns[: turns.index(reply) + goes_on]
    said = [{"role": turn.role, "content": turn.text} for turn in before if turn.text]
    system = [{"role": "system", "content": talk.system}] if talk.system else []
    extra = {_THINK: bool(talk.params[_THINK])} if _THINK in talk.params else {}
    return Messages((*system, *said), extra, add_generation_prompt=not goes_on, continue_final_message=goes_on)


def sampling_of(card: ModelCard, talk: Talk, given: Mapping[str, float]) -> SamplingParams:
    """The session's own values over those the app was `given`, and these over the model's."""
    known = {field.name for field in fields(SamplingParams)}
    own: dict[str, Any] = {
        name: int(value) if name == "top_k" else value for name, value in card.defaults.items() if name in known
    }
    return SamplingParams(**{**own, **given, **{name: value for name, value in talk.params.items() if name != _THINK}})
