"""The HTTP face: routes over one backend. Owns the order of checks and the life of a response; words come from the
dialect modules, bytes from sse.

Everything is checked before the first byte of a response: body, fields, template, prompt length, place in the queue.
So an error is a status with a JSON body, and a 200 is a promise that the reply has been admitted.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import product

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from .. import __version__
from ..chat.backend import LocalBackend, ModelCard, Reply, merge
from ..chat.messages import Messages
from ..engine.events import Delta
from ..errors import BadParameter, EngineError, MlxpagedError, ModelNotFound, Overloaded, PromptTooLong
from ..sched.requests import FinishReason, SamplingParams
from . import fields
from .errors import (
    JsonResponse,
    Refused,
    answer_http,
    answer_ours,
    answer_refused,
    answer_unexpected,
    body_of,
    error_body,
    over_context,
)
from .gate import Gate
from .guard import LOCAL_ORIGINS, Guard
from .handshake import Handshake
from .openai import Asked, ChatDialect, CompletionDialect, Dialect
from .sse import ClientGone, EventStream, event, while_connected

FINGERPRINT = f"mlxpaged-{__version__}"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a person may set about the server. `loopback`: it is reachable from this machine only, so a foreign Host
    header can only come from a web page. `insecure_no_auth`: listening for other machines is wanted. `shutdown_s`: how
    long replies may still run after the first signal. `secret`: what this user's faces know the server by.
    `idle_exit_s`: the server ends itself after this long without a request."""

    loopback: bool = True
    insecure_no_auth: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    keep_alive_s: float = 10.0
    shutdown_s: float = 10.0
    secret: str | None = field(default=None, repr=False)
    idle_exit_s: float | None = None


def create_app(backend: LocalBackend, options: ServerOptions = ServerOptions(), gate: Gate | None = None) -> Starlette:
    """The application over `backend`. `gate` is shared with whoever shuts the server down."""
    api = _Api(backend, options, gate or Gate())
    middleware = [
        Middleware(
            Guard,
            check_host=options.loopback,
            allowed_hosts=options.allowed_hosts,
            cors_origins=options.cors_origins,
        ),
        # The guard lets allowed origins through only, so this has to allow no more than what it is asked.
        Middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_origin_regex=LOCAL_ORIGINS.pattern,
            allow_methods=["*"],
            allow_headers=["*"],
        ),
    ]
    return Starlette(
        routes=[
            Route("/", api.root),
            Route("/health", api.health),
            Route("/handshake", Handshake(options.secret).answer),
            Route("/models", api.models),
            Route("/models/{name:path}", api.model),
            Route("/kv", api.kv),
            Route("/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/completions", api.completions, methods=["POST"]),
            Route("/tokenize", api.tokenize, methods=["POST"]),
            Route("/detokenize", api.detokenize, methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={
            MlxpagedError: answer_ours,
            Refused: answer_refused,
            HTTPException: answer_http,
            ClientGone: _answer_nobody,
            ClientDisconnect: _answer_nobody,
            Exception: answer_unexpected,
        },
    )


class _Api:
    """The handlers. Each checks, starts, and hands the rest to `_respond`."""

    def __init__(self, backend: LocalBackend, options: ServerOptions, gate: Gate) -> None:
        self._backend = backend
        self._options = options
        self._gate = gate

    async def root(self, _: Request) -> Response:
        return PlainTextResponse("mlxpaged is running\n")

    async def health(self, _: Request) -> Response:
        if any(card.state == "ready" for card in await self._backend.models()):
            return JsonResponse({"status": "ok"})
        return JsonResponse(error_body("Loading model", "unavailable_error", code="loading"), 503, {"Retry-After": "1"})

    async def models(self, _: Request) -> Response:
        return JsonResponse({"object": "list", "data": [_listed(card) for card in await self._backend.models()]})

    async def model(self, request: Request) -> Response:
        return JsonResponse(_listed(await self._resolve(request.path_params["name"])))

    async def kv(self, _: Request) -> Response:
        return JsonResponse(await self._backend.stats())

    async def chat_completions(self, request: Request) -> Response:
        ask = fields.parse(fields.ChatRequest, await self._body(request))
        card = await self._resolve(ask.model)
        sampling = fields.chat_sampling(ask, card.defaults)
        prompts = await self._tokenized(card, [fields.conversation_of(ask)])
        asked = replace(self._asked("chatcmpl", ask, card, prompts), logprobs=bool(ask.logprobs))
        return await self._respond(request, ChatDialect(asked, self._backend.token_bytes), ask, prompts, sampling)

    async def completions(self, request: Request) -> Response:
        ask = fields.parse(fields.CompletionRequest, await self._body(request))
        card = await self._resolve(ask.model)
        sampling = fields.completion_sampling(ask, card.defaults)
        given = fields.prompts_of(ask.prompt)
        if len(given) * (ask.n or 1) > fields.MAX_REPLIES:
            raise BadParameter(f"prompts times n must be at most {fields.MAX_REPLIES}", param="prompt")
        prompts = await self._tokenized(card, given)
        echo = given if ask.echo else []
        asked = replace(
            self._asked("cmpl", ask, card, prompts),
            logprobs=ask.logprobs is not None,
            echo=tuple([text if isinstance(text, str) else await self._backend.detokenize(text) for text in echo]),
        )
        return await self._respond(request, CompletionDialect(asked, self._backend.token_bytes), ask, prompts, sampling)

    async def tokenize(self, request: Request) -> Response:
        ask = fields.parse(fields.TokenizeRequest, await self._body(request))
        card = await self._resolve(ask.model)
        text = ask.content if ask.prompt is None else ask.prompt
        if text is None and ask.messages is None:
            raise BadParameter("send a text as content or prompt, or messages", param="content")
        # llama.cpp's dialect adds nothing unless told to, vLLM's adds the bos id unless told not to.
        wanted = ask.add_special if ask.add_special is not None else ask.add_special_tokens
        add_special = wanted if wanted is not None else ask.prompt is not None
        prompt: str | Messages = fields.conversation_of(ask) if text is None else text
        tokens = await self._backend.tokenize(prompt, add_special)
        return JsonResponse({"tokens": tokens, "count": len(tokens), "max_model_len": card.context_len})

    async def detokenize(self, request: Request) -> Response:
        ask = fields.parse(fields.DetokenizeRequest, await self._body(request))
        await self._resolve(ask.model)
        text = await self._backend.detokenize(ask.tokens)
        return JsonResponse({"content": text, "prompt": text})

    async def _body(self, request: Request) -> bytes:
        """The request's body, within the limit. Demanding JSON makes a cross-site form or beacon impossible."""
        self._gate.check()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, f"the content type is {kind or 'missing'}; send application/json")
        limit = self._options.max_body_bytes
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise Refused(413, f"the body has {length} bytes; the limit is {limit}")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise Refused(413, f"the body has more than {limit} bytes, which is the limit")
        return bytes(body)

    async def _resolve(self, name: str | None) -> ModelCard:
        """The card a request means: by name or alias; absent, empty or `default` is whichever is served."""
        cards = await self._backend.models()
        if not cards:
            raise Overloaded("no model is loaded yet; try again soon")
        if name in {None, "", "default"}:
            return cards[0]
        for card in cards:
            if card.name in {name, f"/{name}"}:
                return card
        raise ModelNotFound(f"the model {name!r} is not here; this server has {', '.join(c.name for c in cards)}")

    async def _tokenized(self, card: ModelCard, prompts: Sequence[Messages | str | list[int]]) -> list[list[int]]:
        if card.state == "loading":
            raise Overloaded(f"the model {card.name} is still loading; try again soon")
        return [await self._backend.tokenize(prompt) for prompt in prompts]

    def _asked(self, prefix: str, ask: fields.Shared, card: ModelCard, prompts: Sequence[list[int]]) -> Asked:
        options = ask.stream_options or fields.StreamOptions()
        return Asked(
            id=f"{prefix}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=card.name,
            fingerprint=FINGERPRINT,
            prompt_tokens=tuple(len(prompt) for prompt in prompts),
            n=ask.n or 1,
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
            token_ids=bool(ask.return_token_ids),
            progress=bool(ask.return_progress),
            timings=bool(ask.timings_per_token),
        )

    async def _respond(
        self,
        request: Request,
        dialect: Dialect,
        ask: fields.Shared,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
    ) -> Response:
        try:
            replies = await self._admit(prompts, sampling, dialect.asked.n)
        except PromptTooLong as error:
            card = await self._resolve(dialect.asked.model)
            return JsonResponse(over_context(error, max(dialect.asked.prompt_tokens), card.context_len), 400)
        if ask.stream:
            return EventStream(_events(dialect, replies), self._options.keep_alive_s, lambda: self._gate.leave(replies))
        try:
            return JsonResponse(await while_connected(request.receive, _whole(dialect, replies)))
        finally:
            self._gate.leave(replies)

    async def _admit(self, prompts: Sequence[list[int]], sampling: SamplingParams, n: int) -> list[Reply]:
        """Every reply of the response, or none: what was started is cancelled when a later one is refused."""
        self._gate.check()
        replies: list[Reply] = []
        try:
            for prompt, choice in product(prompts, range(n)):
                replies.append(await self._backend.start(prompt, replace(sampling, choice=choice)))
        except BaseException:
            self._gate.leave(replies)
            raise
        self._gate.enter(replies)
        return replies


async def _events(dialect: Dialect, replies: Sequence[Reply]) -> AsyncGenerator[bytes, None]:
    """The stream's events. A reply that fails after the headers ends the stream with one error event."""
    for data in dialect.opening():
        yield data
    async with aclosing(merge(replies)) as deltas:
        async for index, delta in deltas:
            if failure := _failure(delta):
                yield event(body_of(failure)[1])
                return
            for data in dialect.event(index, delta):
                yield data
    for data in dialect.closing():
        yield data


async def _whole(dialect: Dialect, replies: Sequence[Reply]) -> dict[str, object]:
    async with aclosing(merge(replies)) as deltas:
        async for index, delta in deltas:
            if failure := _failure(delta):
                raise failure
            dialect.take(index, delta)
    return dialect.body()


def _failure(delta: Delta) -> MlxpagedError | None:
    match delta.finish:
        case FinishReason.ERROR:
            return EngineError(delta.error or "the engine failed on this request")
        case FinishReason.CANCELLED:  # nobody but a shutdown cancels a reply whose client is still there
            return Overloaded("the server is shutting down; the reply was cut off")
    return None


def _listed(card: ModelCard) -> dict[str, object]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "mlxpaged",
        "max_model_len": card.context_len,
        "context_length": card.context_len,
        "state": card.state,
        "defaults": dict(card.defaults),
        "served_by": card.served_by,
        "notes": card.notes,
    }


async def _answer_nobody(_: Request, __: Exception) -> Response:
    """The client has left: the status is only for logs."""
    return Response(status_code=499)
