"""One request's way from its body to the end of its response, whatever the dialect. Owns the order of checks, the
waiting for a model, and the life of a response; words come from the dialects, bytes from sse.

Everything is checked before the first byte of a response: body, fields, template, prompt length, place in the queue.
So an error is a status with a JSON body, and a 200 is a promise that the reply has been admitted. One exception is
meant: a stream that must wait for its model to be loaded sends its headers and keep-alives first, and what goes wrong
after that is an error event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from ..chat.backend import LocalBackend, ModelCard, Reply, merge
from ..engine.events import Delta
from ..errors import EngineError, MlxpagedError, ModelLoading, ModelNotFound, Overloaded, PromptTooLong
from ..sched.requests import FinishReason, Grammar, SamplingParams
from .errors import JsonResponse, Refused, body_of
from .gate import Gate
from .metrics import Metrics
from .options import ServerOptions
from .sse import EventStream, event, while_connected


class Dialect(Protocol):
    """One response in the words of one endpoint, streamed (`opening`, `event` per delta, `closing`) or whole (`take`
    per delta, then `body`). `index` counts the replies of all prompts."""

    def opening(self) -> Iterator[bytes]: ...

    def event(self, index: int, delta: Delta) -> Iterator[bytes]: ...

    def closing(self) -> Iterator[bytes]: ...

    def take(self, index: int, delta: Delta) -> None: ...

    def body(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that only lacks its place in the queue: each prompt is answered `n` times, each reply held to a grammar
    of its own where `new_grammar` makes one. `prompt_param` is what the body calls its prompt."""

    dialect: Dialect
    prompts: Sequence[list[int]]
    sampling: SamplingParams
    n: int = 1
    new_grammar: Callable[[], Grammar] | None = None
    prompt_param: str = "messages"


def error_event(error: MlxpagedError) -> bytes:
    """What ends a stream that breaks, in OpenAI's words."""
    return event(body_of(error)[1])


@dataclass(frozen=True, slots=True)
class Asking:
    """A request as far as it can be checked without its model. `prepare` does the rest and is called with that model's
    card, the model being in memory; `failure` words an error after the headers."""

    model: str | None
    stream: bool
    prepare: Callable[[ModelCard], Awaitable[Prepared]]
    failure: Callable[[MlxpagedError], bytes] = error_event


@dataclass(frozen=True, slots=True)
class _Started:
    dialect: Dialect
    replies: list[Reply]


class Exchange:
    """What every endpoint that generates or tokenises needs."""

    def __init__(self, backend: LocalBackend, options: ServerOptions, gate: Gate, metrics: Metrics) -> None:
        self.backend = backend
        self.options = options
        self._gate = gate
        self._metrics = metrics
        self._loads: dict[str, asyncio.Task[None]] = {}  # wishes of clients that were told to come back

    async def body(self, request: Request) -> bytes:
        """The request's body, within the limit. Demanding JSON makes a cross-site form or beacon impossible."""
        self._gate.check()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, f"the content type is {kind or 'missing'}; send application/json")
        limit = self.options.max_body_bytes
        length = request.headers.get("content-length", "")
        told = f"{length} bytes" if length.isdecimal() else f"more than {limit} bytes"
        refused = Refused(413, f"the body has {told}; the limit is {limit}")
        if length.isdecimal() and int(length) > limit:
            raise refused
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise refused
        return bytes(body)

    async def card(self, name: str | None) -> ModelCard:
        """The card of the model a request means; its path may carry a leading slash. Raises ModelNotFound."""
        try:
            return await self.backend.find(name)
        except ModelNotFound:
            if name and not name.startswith("/"):
                with suppress(ModelNotFound):  # the refusal names the model as it was asked for
                    return await self.backend.find(f"/{name}")
            raise

    async def ready(self, name: str | None) -> ModelCard:
        """The card of a model that is in memory now; others are a 503, since nothing keeps the client waiting."""
        card = await self.card(name)
        if card.state != "ready":
            kind = ModelLoading if card.state == "loading" else Overloaded
            raise kind(f"the model {card.name} is {self._state(card)}; try again soon")
        return card

    async def answer(self, request: Request, asking: Asking) -> Response:
        """The response to a request that generates."""
        card = await self.card(asking.model)
        waits = card.state != "ready" or self.backend.switching
        if waits:
            self._refuse_to_wait(card)
        if waits and asking.stream:
            return self._late_stream(card, asking)
        beginning = self._begin(card, asking)
        started = await (while_connected(request.receive, beginning) if waits else beginning)
        if asking.stream:
            return EventStream(
                self._events(started, asking), self.options.keep_alive_s, lambda: self._gate.leave(started.replies)
            )
        try:
            return JsonResponse(await while_connected(request.receive, self._whole(started)))
        finally:
            self._gate.leave(started.replies)

    def _refuse_to_wait(self, card: ModelCard) -> None:
        """Raises Overloaded where no waiting is wanted; the load is asked for, once, so that coming back helps."""
        if self.backend.loading is not None and not self.backend.switching:
            raise ModelLoading(f"the model {self.backend.loading.model} is still loading; try again soon")
        if self.options.on_switch == "retry":
            if card.name not in self._loads:
                self._loads[card.name] = asyncio.create_task(self._load(card.name))
            raise ModelLoading(f"the model {card.name} is {self._state(card)} and will be loaded; try again soon")

    async def _load(self, name: str) -> None:
        try:
            await self.backend.load(name)
        except MlxpagedError:
            return  # told to the next request that means this model
        finally:
            del self._loads[name]

    def _state(self, card: ModelCard) -> str:
        words = {"loading": "still loading", "waiting": "waiting for running replies", "unloaded": "not in memory"}
        return words.get(card.state, "busy")

    async def _begin(self, card: ModelCard, asking: Asking) -> _Started:
        """Load what has to be, check what needs the model, and admit every reply of the response or none. Raises
        Overloaded where the server's end comes first."""
        return await self._gate.coming(self._begun(card, asking))

    async def _begun(self, card: ModelCard, asking: Asking) -> _Started:
        async with self.backend.resident(card.name):
            card = await self.card(card.name)
            prepared = await asking.prepare(card)
            try:
                replies = await self._admit(prepared)
            except PromptTooLong as error:
                error.param = prepared.prompt_param
                error.num_tokens, error.context_len = max(map(len, prepared.prompts)), card.context_len
                raise
        return _Started(prepared.dialect, replies)

    async def _admit(self, prepared: Prepared) -> list[Reply]:
        self._gate.check()
        self.backend.require_room(len(prepared.prompts) * prepared.n)
        replies: list[Reply] = []
        try:
            for prompt, choice in product(prepared.prompts, range(prepared.n)):
                grammar = prepared.new_grammar and prepared.new_grammar()
                sampling = replace(prepared.sampling, choice=choice)
                replies.append(await self.backend.start(prompt, sampling, grammar))
        except BaseException:
            self._gate.leave(replies)
            raise
        self._gate.enter(replies)
        return replies

    def _late_stream(self, card: ModelCard, asking: Asking) -> EventStream:
        replies: list[Reply] = []

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                started = await self._begin(card, asking)
            except MlxpagedError as error:
                yield asking.failure(error)
                return
            replies.extend(started.replies)
            async with aclosing(self._events(started, asking)) as rest:
                async for data in rest:
                    yield data

        return EventStream(events(), self.options.keep_alive_s, lambda: self._gate.leave(replies))

    async def _events(self, started: _Started, asking: Asking) -> AsyncGenerator[bytes, None]:
        """The stream's events. A reply that fails after the headers ends the stream with one error event."""
        dialect, watch = started.dialect, self._metrics.watch(len(started.replies))
        for data in dialect.opening():
            yield data
        async with aclosing(merge(started.replies)) as deltas:
            with closing(watch):
                async for index, delta in deltas:
                    watch(index, delta)
                    if failure := _failure(delta):
                        yield asking.failure(failure)
                        return
                    for data in dialect.event(index, delta):
                        yield data
        for data in dialect.closing():
            yield data

    async def _whole(self, started: _Started) -> dict[str, object]:
        watch = self._metrics.watch(len(started.replies))
        async with aclosing(merge(started.replies)) as deltas:
            with closing(watch):
                async for index, delta in deltas:
                    watch(index, delta)
                    if failure := _failure(delta):
                        raise failure
                    started.dialect.take(index, delta)
        return started.dialect.body()


def _failure(delta: Delta) -> MlxpagedError | None:
    match delta.finish:
        case FinishReason.ERROR:
            return EngineError(delta.error or "the engine failed on this request")
        case FinishReason.CANCELLED:  # nobody but a shutdown cancels a reply whose client is still there
            return Overloaded("the server is shutting down; the reply was cut off")
    return None
