"""The endpoints of OpenAI's dialect that generate. Owns which fields of a body go where; the way of a request is
exchange's, the wording openai's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from ..chat.backend import ModelCard
from ..errors import BadParameter
from . import fields
from .exchange import Asking, Exchange, Prepared
from .openai import Asked, CompletionDialect
from .openai_chat import ChatDialect
from .reply_rules import rules_of

FINGERPRINT = f"mlxpaged-{__version__}"


class Generation:
    """`/chat/completions` and `/completions`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._backend = exchange.backend

    async def chat_completions(self, request: Request) -> Response:
        ask = fields.parse(fields.ChatRequest, await self._exchange.body(request))
        fields.chat_sampling(ask, {})  # what can be refused without the model is
        rules = rules_of(ask)
        conversation = fields.conversation_of(ask, rules.use.tools)

        async def prepare(card: ModelCard) -> Prepared:
            plan = await self._backend.plan(conversation, rules, fields.chat_sampling(ask, card.defaults))
            prompts = [plan.prompt_ids]
            asked = replace(asked_of("chatcmpl", ask, card, prompts), logprobs=bool(ask.logprobs))
            dialect = ChatDialect(asked, self._backend.token_bytes, plan.syntax)
            return Prepared(dialect, prompts, plan.sampling, asked.n, plan.new_grammar)

        return await self._exchange.answer(request, Asking(ask.model, bool(ask.stream), prepare))

    async def completions(self, request: Request) -> Response:
        ask = fields.parse(fields.CompletionRequest, await self._exchange.body(request))
        fields.completion_sampling(ask, {})
        given = fields.prompts_of(ask.prompt)
        if len(given) * (ask.n or 1) > fields.MAX_REPLIES:
            raise BadParameter(f"prompts times n must be at most {fields.MAX_REPLIES}", param="prompt")

        async def prepare(card: ModelCard) -> Prepared:
            prompts = [await self._backend.tokenize(prompt) for prompt in given]
            asked = replace(
                asked_of("cmpl", ask, card, prompts),
                logprobs=ask.logprobs is not None,
                echo=tuple([await self._echo(prompt) for prompt in given]) if ask.echo else (),
                echo_ids=tuple(map(tuple, prompts)) if ask.echo and ask.logprobs is not None else (),
            )
            dialect = CompletionDialect(asked, self._backend.token_bytes)
            sampling = fields.completion_sampling(ask, card.defaults)
            return Prepared(dialect, prompts, sampling, asked.n, prompt_param="prompt")

        return await self._exchange.answer(request, Asking(ask.model, bool(ask.stream), prepare))

    async def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else await self._backend.detokenize(prompt)


def asked_of(prefix: str, ask: fields.Shared, card: ModelCard, prompts: Sequence[list[int]]) -> Asked:
    """What the response to `ask` repeats in every chunk."""
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
