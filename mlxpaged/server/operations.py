"""Everything that generates nothing: models and their coming and going, health, figures, tokens. Owns the wording of
those answers; changes nothing but which model is in memory."""

from __future__ import annotations

import sys
from dataclasses import asdict

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from .. import __version__
from ..chat.backend import LocalBackend, ModelCard
from ..chat.messages import Messages
from ..errors import BadParameter
from . import fields
from .errors import JsonResponse, error_body
from .exchange import Exchange
from .metrics import CONTENT_TYPE, Metrics
from .sse import while_connected

STUCK_S = 120.0
"""An engine with work that has not turned its loop for so long is stuck: a step takes seconds at most."""


class Operations:
    """The handlers; none waits for the engine."""

    def __init__(self, exchange: Exchange, metrics: Metrics) -> None:
        self._exchange = exchange
        self._backend: LocalBackend = exchange.backend
        self._metrics = metrics

    async def root(self, _: Request) -> Response:
        return PlainTextResponse("mlxpaged is running\n")

    async def version(self, _: Request) -> Response:
        return JsonResponse({"version": __version__, "python": sys.version.split()[0]})

    async def health(self, _: Request) -> Response:
        """200 when a request would be answered now or after a load it causes, also while such a load waits for running
        replies (`waits` says for what); 503 while loading, or when the engine is gone or stuck."""
        stats, loading, waiting = await self._backend.stats(), self._backend.loading, self._backend.waiting
        if not self._backend.alive or stats.heartbeat_s > STUCK_S:
            body = error_body("the engine has stopped; restart the server", "unavailable_error", code="engine_dead")
            return JsonResponse(body | {"status": "error", "heartbeat_s": stats.heartbeat_s}, 503)
        if loading is not None:
            body = error_body("Loading model", "unavailable_error", code="loading")
            return JsonResponse(body | {"status": "loading", "loading": asdict(loading)}, 503, {"Retry-After": "1"})
        body = {"status": "ok", "model": stats.model, "heartbeat_s": stats.heartbeat_s}
        return JsonResponse(body | ({"waits": asdict(waiting)} if waiting else {}))

    async def models(self, _: Request) -> Response:
        return JsonResponse({"object": "list", "data": [_listed(card) for card in await self._backend.models()]})

    async def model(self, request: Request) -> Response:
        return JsonResponse(_listed(await self._exchange.card(request.path_params["name"])))

    async def load(self, request: Request) -> Response:
        """Makes a model ready and answers when it is."""
        card = await self._control(request)
        await while_connected(request.receive, self._backend.load(card.name))
        return JsonResponse({"success": True, **_listed(await self._exchange.card(card.name))})

    async def unload(self, request: Request) -> Response:
        card = await self._control(request)
        await while_connected(request.receive, self._backend.unload(card.name))
        return JsonResponse({"success": True, **_listed(await self._exchange.card(card.name))})

    async def kv(self, _: Request) -> Response:
        stats = await self._backend.stats()
        hit_rate = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        return JsonResponse(msgspec.to_builtins(stats) | {"hit_rate": hit_rate})

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.render(await self._backend.stats()), media_type=CONTENT_TYPE)

    async def tokenize(self, request: Request) -> Response:
        ask = fields.parse(fields.TokenizeRequest, await self._exchange.body(request))
        card = await self._exchange.ready(ask.model)
        text = ask.content if ask.prompt is None else ask.prompt
        if text is None and ask.messages is None:
            raise BadParameter("send a text as content or prompt, or messages", param="content")
        # llama.cpp's dialect adds nothing unless told to, vLLM's adds the bos id unless told not to.
        wanted = ask.add_special if ask.add_special is not None else ask.add_special_tokens
        add_special = wanted if wanted is not None else ask.prompt is not None
        prompt: str | Messages = fields.conversation_of(ask) if text is None else text
        tokens = await self._backend.tokenize(prompt, add_special)
        body = {"tokens": tokens, "count": len(tokens), "max_model_len": card.context_len}
        if ask.with_pieces:
            body["tokens"] = [{"id": token_id, "piece": self._piece(token_id)} for token_id in tokens]
        if ask.return_token_strs:
            body["token_strs"] = [self._backend.token_bytes(token_id).decode(errors="replace") for token_id in tokens]
        return JsonResponse(body)

    async def detokenize(self, request: Request) -> Response:
        ask = fields.parse(fields.DetokenizeRequest, await self._exchange.body(request))
        await self._exchange.ready(ask.model)
        text = await self._backend.detokenize(ask.tokens)
        return JsonResponse({"content": text, "prompt": text})

    async def _control(self, request: Request) -> ModelCard:
        ask = fields.parse(fields.ModelRequest, await self._exchange.body(request))
        if not ask.model:
            raise BadParameter("name the model", param="model")
        return await self._exchange.card(ask.model)

    def _piece(self, token_id: int) -> str | list[int]:
        """A token as llama.cpp writes it: its text, or its bytes where they are no text by themselves."""
        raw = self._backend.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return list(raw)


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
        "quantisation": card.quantisation,
        "family": card.family,
    }
