"""The one door to something that answers. Owns the Backend contract, the reply a face reads, and the backend over an
engine in this process; never computes a token and never speaks HTTP.

A call has two phases: `start` checks everything and raises before anything is produced, so that a server can answer
4xx before its headers; the Reply it returns is then read as an async iterator of Delta and can be cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol

from ..engine.events import Delta, EngineStats, Loading, ModelInfo
from ..errors import BadParameter, ModelLoading, ModelNotFound
from ..sched.requests import Grammar, SamplingParams
from .messages import Messages
from .plan import ChatPlan, ReplyRules
from .prompts import Prompt, Prompts, context_len, fitted
from .residency import Residency, Waiting

if TYPE_CHECKING:
    from ..engine.service import EngineService


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as a face lists it. `state` is "ready", "loading", "waiting" (its load begins once running replies of
    another have ended) or "unloaded" (on disk; naming it in a request or `load` makes it ready); `defaults` are the
    model's own sampling defaults; `context_len`, the most tokens one request may hold, is None while unknown, and so
    are `quantisation` and `family` (see ModelInfo)."""

    name: str
    state: str = "ready"
    context_len: int | None = None
    created: int = 0
    defaults: Mapping[str, float] = field(default_factory=dict)
    served_by: str = "paged"
    notes: tuple[str, ...] = ()
    quantisation: str | None = None
    family: str | None = None


class Reply:
    """One reply being made: `async for delta in reply`. The last delta, and only it, has `finish`.

    Leaving the loop early, closing the iterator or cancelling the task that reads it cancels the request. `cancel`
    does so from outside; the iterator then ends with a delta of finish CANCELLED. Owned by one asyncio loop.
    """

    def __init__(self, prompt_tokens: int | None, cancel: Callable[[], object]) -> None:
        self.prompt_tokens = prompt_tokens
        self._cancel = cancel
        self._deltas: deque[Delta] = deque()
        self._ring: Callable[[], None] | None = None
        self._ended = False

    def take(self, delta: Delta) -> None:
        """Hand over the next delta; on the loop's thread."""
        self._deltas.append(delta)
        self._ended = self._ended or delta.finish is not None
        if self._ring:
            self._ring()

    def cancel(self) -> None:
        """Stop the request; nothing happens when it has already ended."""
        if not self._ended:
            self._cancel()

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        async with aclosing(merge([self])) as deltas:
            async for _, delta in deltas:
                yield delta


async def merge(replies: Sequence[Reply]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(index, delta) of several replies as they come, until all have ended; closing it cancels those still running."""
    bell = asyncio.Event()
    for reply in replies:
        reply._ring = bell.set
    try:
        while True:
            bell.clear()
            for index, reply in enumerate(replies):
                while reply._deltas:
                    yield index, reply._deltas.popleft()
            if all(reply._ended and not reply._deltas for reply in replies):
                return
            await bell.wait()
    finally:
        for reply in replies:
            reply.cancel()


class Backend(Protocol):
    """What every face speaks to: an engine in this process, or a server."""

    async def start(self, prompt: Prompt, sampling: SamplingParams, grammar: Grammar | None = None) -> Reply:
        """Check and submit one request; `grammar`, which belongs to it alone, says what its reply may be. Raises
        RequestError (the request is wrong), Overloaded (try again later) or Unreachable, always before the first
        delta."""
        ...

    async def tokenize(self, prompt: Prompt, add_special: bool = True) -> list[int]:
        """The ids `start` would submit. `add_special`: whether plain text gets the model's leading bos id."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str: ...

    async def models(self) -> tuple[ModelCard, ...]: ...

    async def load(self, model: str) -> None:
        """Make `model` ready. Raises ModelNotFound where it is not known there; nothing is downloaded."""
        ...

    async def unload(self, model: str) -> None:
        """Give the memory of `model` back. Raises ModelNotFound where it is not known there."""
        ...

    async def stats(self) -> EngineStats: ...


class LocalBackend:
    """A backend over an engine in this process.

    `name` is the model that a face starts with; `aliases` are further names of it, one with a star many. `installed`
    lists what else may be loaded because a request says so: names of models that are on disk.
    """

    def __init__(
        self,
        service: EngineService,
        name: str | None = None,
        aliases: Sequence[str] = (),
        installed: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        self._service = service
        self._name = name
        self._aliases = tuple(alias for alias in aliases if alias != name)
        self._installed = installed
        self._residency = Residency(service)
        self._prompts = Prompts()
        self._inbox: _Inbox | None = None

    async def start(self, prompt: Prompt, sampling: SamplingParams, grammar: Grammar | None = None) -> Reply:
        model = self._model()
        prompt_ids = await self.tokenize(prompt)
        sampling = fitted(model, len(prompt_ids), sampling)
        inbox = self._inbox_of(asyncio.get_running_loop())
        # The handle exists only once `submit` returns; the engine may call the sink before that, never needing it.
        reply = Reply(len(prompt_ids), lambda: handle.cancel())
        sampling = replace(sampling, continues_text=sampling.continues_text or isinstance(prompt, str))
        handle = self._service.submit(prompt_ids, sampling, lambda delta: inbox.post(reply, delta), grammar)
        self._residency.reply_began()  # its deltas are delivered by this loop, so its end has not come yet
        return reply

    def require_room(self, count: int) -> None:
        """For a response of `count` replies. Raises BadParameter where so many never are taken, Overloaded where they
        would be later."""
        self._service.require_room(count)

    async def plan(self, conversation: Messages, rules: ReplyRules, sampling: SamplingParams) -> ChatPlan:
        """What a chat request needs to start, and how to read its replies. Raises RequestError, also for a schema
        that no grammar can hold a reply to."""
        return await asyncio.to_thread(self._prompts.plan, self._model(), conversation, rules, sampling)

    async def tokenize(self, prompt: Prompt, add_special: bool = True) -> list[int]:
        model = self._model()
        if not isinstance(prompt, Messages | str):
            return list(prompt)
        # Rendering and tokenising a long conversation takes long enough to be felt by other streams of this loop.
        return await asyncio.to_thread(self._prompts.encode, model, prompt, add_special)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        model = self._model()
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < model.vocab_size):
            raise BadParameter(f"token ids go from 0 to {model.vocab_size - 1}", param="tokens")
        return await asyncio.to_thread(model.tokenizer.decode, list(token_ids), skip_special=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for; they need not be valid UTF-8 by themselves."""
        return self._model().tokenizer.token_bytes(token_id)

    async def models(self) -> tuple[ModelCard, ...]:
        cards = self._near_cards()
        known = {card.name for card in cards}
        more = await asyncio.to_thread(self._installed)
        return (*cards, *(self._absent(name) for name in dict.fromkeys(more) if name not in known))

    async def find(self, name: str | None) -> ModelCard:
        """The card that a request means: absent, empty or `default` is whichever model is ready, else the first one.
        Raises ModelNotFound."""
        cards = self._near_cards()
        if name in {None, "", "default"}:
            if not cards:
                raise ModelLoading("no model is loaded yet; try again soon")
            return cards[0]
        for card in cards:
            if card.name == name:
                return card
        if self._name and any(fnmatchcase(str(name), alias) for alias in self._aliases):
            return replace(await self.find(self._name), name=str(name))
        if name in await asyncio.to_thread(self._installed):
            return self._absent(str(name))
        known = ", ".join(dict.fromkeys(card.name for card in cards))
        raise ModelNotFound(f"the model {name!r} is not here; this server has {known}; /v1/models lists all of them")

    @property
    def switching(self) -> bool:
        """Whether a request that comes now has to wait whatever it names: a model is being replaced, or is to be and
        has waited for long enough."""
        return self._residency.switching

    @property
    def waiting(self) -> Waiting | None:
        """The switch to another model that waits for running replies."""
        return self._residency.waiting

    @asynccontextmanager
    async def resident(self, name: str) -> AsyncIterator[None]:
        """Inside, the model called `name` (see `find`) is in memory and stays. It is loaded first where it is not:
        running replies finish before (see residency), and nothing is downloaded. Raises Overloaded while the first
        load lasts and where running replies do not end in time, and what loading raises."""
        async with self._residency.of(self._own_name(name)):
            yield

    async def load(self, model: str) -> None:
        async with self.resident((await self.find(model)).name):
            return

    async def unload(self, model: str) -> None:
        await self._residency.unload(self._own_name((await self.find(model)).name))

    async def stats(self) -> EngineStats:
        return self._service.stats()

    @property
    def loading(self) -> Loading | None:
        """The load under way, with its progress."""
        return self._service.loading

    @property
    def alive(self) -> bool:
        """Whether there is still an engine that could answer."""
        return self._service.alive

    def _own_name(self, name: str) -> str:
        return self._name if self._name and any(fnmatchcase(name, alias) for alias in self._aliases) else name

    def _near_cards(self) -> list[ModelCard]:
        """The model in memory first, then the one that the face was started with, each with its aliases."""
        model = self._service.model
        cards = [] if model is None else [_ready(model)]
        if self._name and (model is None or model.name != self._name):
            cards.append(self._absent(self._name))
        own = next((card for card in cards if card.name == self._name), None)
        return [*cards, *(replace(own, name=alias) for alias in self._aliases if own and "*" not in alias)]

    def _absent(self, name: str) -> ModelCard:
        loading, waiting = self._service.loading, self.waiting
        if loading and loading.model == name:
            return ModelCard(name, state="loading")
        return ModelCard(name, state="waiting" if waiting and waiting.model == name else "unloaded")

    def _model(self) -> ModelInfo:
        if self._service.model is None:
            raise ModelLoading(f"the model {self._name or ''} is still loading; try again soon".replace("  ", " "))
        return self._service.model

    def _inbox_of(self, loop: asyncio.AbstractEventLoop) -> _Inbox:
        if self._inbox is None or self._inbox.loop is not loop:
            self._inbox = _Inbox(loop, self._residency.reply_ended)
        return self._inbox


class _Inbox:
    """Deltas on their way from the engine's thread to one loop: a step's deltas cost one wake-up of the loop. `on_end`
    is called on that loop after the last delta of each reply."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        self.loop = loop
        self._on_end = on_end
        self._posted: deque[tuple[Reply, Delta]] = deque()
        self._waking = False

    def post(self, reply: Reply, delta: Delta) -> None:
        """On the engine's thread; never blocks, never raises."""
        self._posted.append((reply, delta))
        if not self._waking:
            self._waking = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: its readers are gone
                reply.cancel()

    def _deliver(self) -> None:
        # Lowered before the deque is emptied: a post from here on wakes the loop again, so none is left behind.
        self._waking = False
        while self._posted:
            reply, delta = self._posted.popleft()
            reply.take(delta)
            if delta.finish is not None:
                self._on_end()


def _ready(model: ModelInfo) -> ModelCard:
    return ModelCard(
        name=model.name,
        context_len=context_len(model),
        created=model.created,
        defaults=model.defaults,
        served_by=model.served_by,
        notes=model.notes,
        quantisation=model.quantisation,
        family=model.family,
    )
