"""What a prompt is to the model in memory: text by its template, ids by its tokenizer, counts that fit its context.
Owns the template and the reply format of the model last asked about; submits nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..engine.events import ModelInfo
from ..errors import RequestError
from ..sched.requests import SamplingParams
from .messages import Messages
from .plan import ChatFormat, ChatPlan, ReplyRules
from .template import ChatTemplate

Prompt = Messages | str | Sequence[int]
"""A conversation (rendered by the model's template), a plain text (tokenised as it is) or token ids."""


class Prompts:
    """Prompts of whichever model a call names; what is derived from a model is kept until another one is named."""

    def __init__(self) -> None:
        self._template: tuple[ModelInfo, ChatTemplate] | None = None
        self._format: tuple[ModelInfo, ChatFormat] | None = None

    def encode(self, model: ModelInfo, prompt: Messages | str, add_special: bool) -> list[int]:
        """The ids of a prompt. Raises RequestError for what has none."""
        tokenizer = model.tokenizer
        if isinstance(prompt, Messages):
            text, add_special = self._template_of(model).render(prompt), False
        else:
            bos = tokenizer.special_tokens.get("bos_token")
            text, add_special = prompt, add_special and not (bos and prompt.startswith(bos))
        return self._ids(model, text, add_special)

    def plan(self, model: ModelInfo, conversation: Messages, rules: ReplyRules, sampling: SamplingParams) -> ChatPlan:
        """See `LocalBackend.plan`."""
        template, held = self._template_of(model), self._format
        if held is None or held[0] is not model:
            held = self._format = (model, ChatFormat(model.tokenizer, template, model.vocab_size))
        prompt = template.render(conversation)
        return held[1].plan(prompt, self._ids(model, prompt, False), conversation, rules, sampling)

    def _ids(self, model: ModelInfo, text: str, add_special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not valid Unicode: {error.reason}") from error
        return list(model.tokenizer.encode(text, add_special=add_special))

    def _template_of(self, model: ModelInfo) -> ChatTemplate:
        held = self._template
        if held and held[0] is model:
            return held[1]
        if model.tokenizer.chat_template is None:
            raise RequestError(f"{model.name} has no chat template; use plain completions (`run --raw`)")
        template = ChatTemplate(model.tokenizer.chat_template, model.tokenizer.special_tokens)
        self._template = (model, template)
        return template


def context_len(model: ModelInfo) -> int:
    """The most tokens one request may hold, prompt and reply: the model's context, or what the KV pool admits."""
    return min(model.context_len, model.max_prompt + 1)


def fitted(model: ModelInfo, prompt_len: int, sampling: SamplingParams) -> SamplingParams:
    """Counts cut down to what can matter: clients send a fixed max_tokens whatever the prompt's length. A prompt that
    leaves no room is left for the engine to refuse."""
    room = max(context_len(model) - prompt_len, 1)
    return replace(
        sampling,
        max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        min_tokens=min(sampling.min_tokens, room),
        top_k=min(sampling.top_k, model.vocab_size),
    )
