"""The HTTP face: routes and middleware over one backend. Owns which path means what and who may take it; the handlers
live beside their dialects."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ..chat.backend import LocalBackend
from ..chat.servers import key_of
from ..errors import MlxpagedError
from .errors import Refused, answer_http, answer_ours, answer_refused, answer_unexpected
from .exchange import Exchange
from .gate import Gate
from .generation import Generation
from .guard import LOCAL_ORIGINS, Guard
from .handshake import Handshake
from .keys import Keys
from .messages import AnthropicMessages
from .metrics import Metrics
from .operations import Operations
from .options import ServerOptions
from .sse import ClientGone
from .unread import Unread


def create_app(backend: LocalBackend, options: ServerOptions, gate: Gate | None = None) -> Starlette:
    """The application over `backend`. `gate` is shared with whoever shuts the server down."""
    metrics = Metrics()
    exchange = Exchange(backend, options, gate or Gate(), metrics)
    generation, anthropic = Generation(exchange), AnthropicMessages(exchange)
    operations = Operations(exchange, metrics)
    return Starlette(
        routes=[
            Route("/", operations.root),
            Route("/health", operations.health),
            Route("/version", operations.version),
            Route("/handshake", Handshake(options.secret).answer),
            Route("/metrics", operations.metrics),
            Route("/kv", operations.kv),
            Route("/models", operations.models),
            Route("/models/load", operations.load, methods=["POST"]),
            Route("/models/unload", operations.unload, methods=["POST"]),
            Route("/models/{name:path}", operations.model),
            Route("/chat/completions", generation.chat_completions, methods=["POST"]),
            Route("/completions", generation.completions, methods=["POST"]),
            Route("/messages", anthropic.messages, methods=["POST"]),
            Route("/messages/count_tokens", anthropic.count_tokens, methods=["POST"]),
            Route("/tokenize", operations.tokenize, methods=["POST"]),
            Route("/detokenize", operations.detokenize, methods=["POST"]),
        ],
        middleware=_middleware(options),
        exception_handlers={
            MlxpagedError: answer_ours,
            Refused: answer_refused,
            HTTPException: answer_http,
            ClientGone: _answer_nobody,
            ClientDisconnect: _answer_nobody,
            Exception: answer_unexpected,
        },
    )


def _middleware(options: ServerOptions) -> list[Middleware]:
    """From the outside in: what is left of a body, where a request comes from, what a page may read, who asks."""
    keys = options.api_keys
    if keys and options.secret:
        keys = (*keys, key_of(options.secret))  # this user's own faces have no other
    return [
        Middleware(Unread),
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
        Middleware(Keys, keys=keys, loopback=options.loopback),
    ]


async def _answer_nobody(_: Request, __: Exception) -> Response:
    """The client has left: the status is only for logs."""
    return Response(status_code=499)
