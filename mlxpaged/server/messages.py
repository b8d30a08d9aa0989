"""The endpoints of Anthropic's dialect. Owns which fields of a body go where; the way of a request is exchange's, the
wording anthropic's."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import Response

from ..chat.backend import ModelCard
from . import fields
from .anthropic import AnthropicDialect, MessageHead, error_event
from .anthropic_fields import MessagesRequest, chat_request
from .errors import JsonResponse
from .exchange import Asking, Exchange, Prepared
from .reply_rules import rules_of


class AnthropicMessages:
    """`/messages` and `/messages/count_tokens`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._backend = exchange.backend

    async def messages(self, request: Request) -> Response:
        ask = chat_request(fields.parse(MessagesRequest, await self._exchange.body(request)))
        fields.chat_sampling(ask, {})  # what can be refused without the model is
        rules = rules_of(ask)
        conversation = fields.conversation_of(ask, rules.use.tools)

        async def prepare(card: ModelCard) -> Prepared:
            plan = await self._backend.plan(conversation, rules, fields.chat_sampling(ask, card.defaults))
            head = MessageHead(f"msg_{secrets.token_hex(12)}", card.name, len(plan.prompt_ids))
            dialect = AnthropicDialect(head, plan.syntax)
            return Prepared(dialect, [plan.prompt_ids], plan.sampling, new_grammar=plan.new_grammar)

        return await self._exchange.answer(request, Asking(ask.model, bool(ask.stream), prepare, error_event))

    async def count_tokens(self, request: Request) -> Response:
        """The length of the prompt that the same body would make; nothing is generated."""
        ask = chat_request(fields.parse(MessagesRequest, await self._exchange.body(request)))
        conversation = fields.conversation_of(ask, rules_of(ask).use.tools)
        card = await self._exchange.card(ask.model)
        async with self._backend.resident(card.name):
            return JsonResponse({"input_tokens": len(await self._backend.tokenize(conversation))})
