"""What a request is told before it is queued. Owns the checks that need the model or the engine's room; those
of a value's range are SamplingParams' own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import BadParameter, Overloaded, PromptTooLong
from ..sched.requests import SamplingParams
from .events import ModelInfo


def checked_prompt(prompt_ids: Sequence[int], sampling: SamplingParams, info: ModelInfo) -> np.ndarray:
    """The prompt, int32, once it and `sampling` fit the model. Raises BadParameter or PromptTooLong."""
    if not len(prompt_ids):
        raise BadParameter("the prompt is empty; give at least one token", param="prompt")
    prompt = np.asarray(prompt_ids, np.int64)
    if prompt.min() < 0 or prompt.max() >= info.vocab_size:
        raise BadParameter(f"the prompt holds a token id outside 0..{info.vocab_size - 1}", param="prompt")
    for token, _ in sampling.logit_bias:
        if not 0 <= token < info.vocab_size:
            raise BadParameter(f"logit_bias names token {token}; ids go from 0 to {info.vocab_size - 1}", "logit_bias")
    for token in sampling.stop_token_ids:
        if not 0 <= token < info.vocab_size:
            raise BadParameter(
                f"stop_token_ids names {token}; ids go from 0 to {info.vocab_size - 1}", "stop_token_ids"
            )
    if len(prompt) > info.max_prompt:
        hint = f", or raise {flag}" if (flag := info.flag_for_more()) else ""
        raise PromptTooLong(
            f"this model's maximum context length is {info.max_prompt + 1} tokens, reply included; your request has "
            f"{len(prompt)}; shorten the prompt{hint}",
            param="messages",
        )
    return prompt.astype(np.int32)


def require_room(count: int, live: int, most: int) -> None:
    """For `count` requests of one response, beside `live` others, where `most` are taken at once. Raises BadParameter
    where so many never are, Overloaded where they would be later."""
    if count > most:
        room = f"this server takes {most} (--max-num-seqs and --max-queue)"
        raise BadParameter(f"{count} replies are asked for at once; {room}", param="n")
    if live + count > most:
        raise Overloaded(f"{live} of {most} requests are live already; try again, or raise --max-queue")
