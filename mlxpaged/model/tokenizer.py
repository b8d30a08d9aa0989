"""Text to ids and back, for one model. Owns the tokenizer object; knows nothing of mlx, requests or templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tokenizers import Tokenizer as RawTokenizer


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with what else the model's files say about text.

    `special_tokens` maps template names to texts ("bos_token", "eos_token", ...). `end_token_ids` end a reply: the
    end-of-sequence ids and the template's end-of-turn ids. `add_bos`: whether plain text starts with the bos id.
    Safe to use from any thread.
    """

    raw: RawTokenizer
    end_token_ids: frozenset[int]
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    add_bos: bool = False
