"""Text to ids and back, for one model. Owns the tokenizer object; knows nothing of mlx, requests or templates.

Going back is done in bytes: every id stands for a fixed byte string, so that a reply streamed token by token equals
the reply decoded at once, whatever the ids, and a token's exact bytes are known for logprobs.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

_SPACE = "▁"  # SentencePiece's mark for a space


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

    @cached_property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added ones included; a model's logits may be padded beyond it."""
        return self.raw.get_vocab_size(with_added_tokens=True)

    @cached_property
    def _specials(self) -> frozenset[int]:
        return frozenset(id_ for id_, token in self.raw.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _decoding(self) -> _Decoding:
        return _Decoding.of(self.raw)

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        return {}

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Ids of `text`. Special tokens written in it become their ids. `add_special` adds what the model expects
        around plain text (its bos id, for most). Half a surrogate pair, which JSON can carry, becomes U+FFFD."""
        try:
            encoding = self.raw.encode(text, add_special_tokens=add_special)
        except TypeError:  # the library takes no lone surrogates
            whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            encoding = self.raw.encode(whole, add_special_tokens=add_special)
        return encoding.ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        detokenizer = self.detokenizer(skip_special)
        return "".join([*map(detokenizer.add, ids), detokenizer.finish()])

    def detokenizer(
        self, skip_special: bool = True, continuing: bool = False, shown: Iterable[int] = ()
    ) -> Detokenizer:
        """A fresh streaming decoder. `continuing`: the text goes on from earlier text, so that the space a
        SentencePiece model writes before a first word is kept. `shown`: special ids that are not skipped."""
        hidden = self._specials.difference(shown) if skip_special else frozenset()
        return Detokenizer(self, hidden, self._decoding.strip_spaces if not continuing else 0)

    def token_id(self, text: str) -> int | None:
        """The id whose piece is exactly `text`, as special tokens and markers are; None where there is none."""
        return self.raw.token_to_id(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes `token_id` stands for, also where they are a part of a character."""
        known = self._bytes.get(token_id)
        if known is None:
            piece = self.raw.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if piece is None else self._decoding.to_bytes(token_id, piece)
        return known

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is a control token rather than text."""
        return token_id in self._specials


class Detokenizer:
    """Ids to text, one at a time. Bytes wait until they complete a character, so that no piece is broken."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], strip_spaces: int) -> None:
        self._tokenizer, self._hidden, self._strip_spaces = tokenizer, hidden, strip_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        if token_id in self._hidden:
            return ""
        return self._start(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """What is left: U+FFFD where the ids ended inside a character."""
        return self._start(self._utf8.decode(b"", final=True))

    def _start(self, text: str) -> str:
        while text and self._strip_spaces:
            if text[0] != " ":
                self._strip_spaces = 0
            else:
                text, self._strip_spaces = text[1:], self._strip_spaces - 1
        return text


@dataclass(frozen=True)
class _Decoding:
    """How pieces of one tokenizer become bytes, and how many spaces are dropped from a text's start."""

    to_bytes: Callable[[int, str], bytes]
    strip_spaces: int = 0

    @staticmethod
    def of(raw: RawTokenizer) -> _Decoding:
        """Read the decoder's own description. One we do not know is asked piece by piece."""
        steps = _steps(raw)
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return _Decoding(lambda id_, piece: _byte_level(piece))
        if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            replace = [_replacement(step) for step in steps if step["type"] in ("Replace", "Metaspace")]
            if all(replace):
                fallback = "ByteFallback" in kinds
                strip = sum(_stripped(step) for step in steps)
                pairs = [pair for pair in replace if pair]
                return _Decoding(lambda id_, piece: _sentencepiece(piece, pairs, fallback), strip)
        return _Decoding(_probe(raw))


def _steps(raw: RawTokenizer) -> list[dict[str, Any]]:
    """The decoder's steps as tokenizer.json describes them."""
    if raw.decoder is None:
        return []
    described = json.loads(raw.decoder.__getstate__())
    return described["decoders"] if described["type"] == "Sequence" else [described]


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    """What a step turns into what; None for a pattern that is no plain text."""
    if step["type"] == "Metaspace":
        return step.get("replacement", _SPACE), " "
    pattern = step["pattern"].get("String")
    return (pattern, step["content"]) if pattern is not None else None


def _stripped(step: dict[str, Any]) -> int:
    if step["type"] == "Strip":
        return step["start"] if step["content"] == " " else 0
    return int(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")


def _sentencepiece(piece: str, replace: Sequence[tuple[str, str]], byte_fallback: bool) -> bytes:
    if byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    for old, new in replace:
        piece = piece.replace(old, new)
    return piece.encode("utf-8")


def _byte_level(piece: str) -> bytes:
    """GPT-2's printable letters back to bytes; a piece with any other letter is an added token, literally itself."""
    try:
        return bytes(_BYTE_OF[letter] for letter in piece)
    except KeyError:
        return piece.encode("utf-8")


def _byte_letters() -> dict[str, int]:
    """The letter GPT-2's vocabularies write for each byte: itself where it prints, else the next from U+0100 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_letters()
BYTE_LETTERS = {byte: letter for letter, byte in _BYTE_OF.items()}


def _probe(raw: RawTokenizer) -> Callable[[int, str], bytes]:
    """Decode a piece after itself: what the second one adds is its text inside a sentence."""

    def to_bytes(token_id: int, piece: str) -> bytes:
        once = raw.decode([token_id], skip_special_tokens=False)
        twice = raw.decode([token_id, token_id], skip_special_tokens=False)
        return (twice[len(once) :] if twice.startswith(once) else piece).encode("utf-8")

    return to_bytes
