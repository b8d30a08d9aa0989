"""Which ids end a reply. Owns the names of end-of-turn tokens; a model that lacks one here talks on for ever."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer as RawTokenizer

_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|endofturn|>",
    "[|endofturn|]",
    "<end_of_utterance>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<｜end▁of▁sentence｜>",
)
_HARMONY_RETURN, _HARMONY_MESSAGE_END = "<|return|>", "<|end|>"
"""In gpt-oss's format a reply is several messages; only return and call end it."""


def end_token_ids(raw: RawTokenizer, declared: Iterable[int | None], template: str | None) -> frozenset[int]:
    """The ids the model's files declare, and those of end-of-turn tokens that the vocabulary holds and the chat
    template writes."""
    ends = {id_ for id_ in declared if id_ is not None}
    harmony = raw.token_to_id(_HARMONY_RETURN) is not None
    for text in _END_OF_TURN:
        if harmony and text == _HARMONY_MESSAGE_END:
            continue
        if template and text in template and (id_ := raw.token_to_id(text)) is not None:
            ends.add(id_)
    return frozenset(ends)
