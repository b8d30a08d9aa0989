"""What a scheduler tells its owner: tokens, progress of prompts, ends. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from .requests import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A sampled id reached the host. `finish` ends the request."""

    request_id: int
    token_id: int
    logprob: TokenLogprob | None
    finish: FinishReason | None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """So many of a prompt's tokens have their KV now; `logprobs` are those of the next ids of the prompt, where asked
    for: together they run parallel to the prompt from its second id on."""

    request_id: int
    computed: int
    total: int
    cached: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class EndEvent:
    """A request ended without a token of its own: memory ran out, or its step failed."""

    request_id: int
    finish: FinishReason
    error: str | None = None


Event = TokenEvent | PromptEvent | EndEvent
