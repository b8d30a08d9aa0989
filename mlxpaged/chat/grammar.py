"""Replies held to a grammar, by llguidance. Owns one view of a model's vocabulary, how large a JSON schema may be, and
the masks of one reply; knows no family's markup and no request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ..errors import BadParameter, MlxpagedError
from ..model.tokenizer import Tokenizer
from .schema_branches import target

MAX_SCHEMA_BYTES = 256 * 1024
MAX_GRAMMAR_BYTES = 1024 * 1024
MAX_SCHEMA_LEVELS = 800
"""Nesting, all referenced definitions together: the library walks a schema recursively on this thread's stack."""

MAX_PATTERNS_AT_ONCE = 8
"""Patterns that one text may have to match together: the library's work doubles with each, beyond its own limits."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_WHITE_SPACE = r"\n?[ ]{0,20}"
"""What may stand between two tokens of JSON: one line break and its indentation, so that none runs away."""

_LIMITS = LLParserLimits(verbose_errors=False)


class GrammarFault(MlxpagedError):
    """A grammar met a limit, or an id it does not allow: its reply ends."""


class Vocabulary:
    """One model's tokens as llguidance sees them. `marks` are texts that count as special where they are one token,
    so that free text cannot hold them. Safe to use from any thread; takes a moment to make."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, marks: Iterable[str] = ()) -> None:
        known = min(vocab_size, tokenizer.vocab_size)
        found = {mark: tokenizer.token_id(mark) for mark in marks}
        self._marks = {mark: id_ for mark, id_ in found.items() if id_ is not None and id_ < known}
        special = {id_ for id_ in range(known) if tokenizer.is_special(id_)} | set(self._marks.values())
        ends = sorted(id_ for id_ in tokenizer.end_token_ids if id_ < known)
        if not ends:
            raise BadParameter("this model has no end token, so its replies cannot be held to a format")
        padding = [b""] * (vocab_size - known)
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id, self.special_token_ids = ends[0], None, sorted(special | set(ends))
        self.tokens = [tokenizer.token_bytes(id_) for id_ in range(known)] + padding
        self._raw = LLTokenizer(TokenizerWrapper(self), eos_token=ends)

    def __call__(self, text: bytes) -> list[int]:
        """How the library asks for ids."""
        return list(self._tokenizer.encode(text.decode(errors="replace")))

    def is_mark(self, text: str) -> bool:
        """Whether `text` is one of the marks and one token."""
        return text in self._marks

    def literal(self, text: str) -> str:
        """`text` in the library's notation, marks as their ids."""
        pattern = "|".join(re.escape(mark) for mark in sorted(self._marks, key=len, reverse=True))
        pieces = re.split(f"({pattern})", text) if pattern else [text]
        words = [f"<[{self._marks[piece]}]>" if piece in self._marks else _quoted(piece) for piece in pieces if piece]
        return " ".join(words)

    def compile(self, notation: str, param: str) -> CompiledGrammar:
        """Raises BadParameter with the library's reason where the grammar is none, or can say nothing."""
        if len(notation) > MAX_GRAMMAR_BYTES:
            raise BadParameter(f"{param} makes a grammar of {len(notation)} bytes; use fewer or smaller schemas", param)
        matcher = LLMatcher(self._raw, LLMatcher.grammar_from_lark(notation), log_level=0, limits=_LIMITS)
        trial = matcher.deep_copy()
        if not trial.is_error():
            trial.compute_bitmask()
        if trial.is_error():
            raise BadParameter(f"{param} cannot be held to: {_reason(trial)}", param=param)
        return CompiledGrammar(matcher)


class CompiledGrammar:
    """What many replies may be held to."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fresh(self) -> ReplyGrammar:
        """A grammar at its start, for one reply."""
        return ReplyGrammar(self._matcher.deep_copy())


class ReplyGrammar:
    """One reply's place in its grammar; the engine's `Grammar`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fill(self, mask: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise GrammarFault(_reason(self._matcher))

    def advance(self, token_id: int) -> bool:
        # A refused id is a state the matcher never leaves: the next fill tells.
        return self._matcher.consume_token(token_id) and self._matcher.is_stopped()


def schema_notation(schema: Mapping[str, Any], param: str, lenient: bool = False) -> str:
    """A rule's right side that says JSON of this schema. `lenient`: keywords the library does not know are ignored.
    Raises BadParameter for a schema over the limits."""
    if (patterns := _patterns_at_once(schema)) > MAX_PATTERNS_AT_ONCE:
        raise BadParameter(
            f"{param} combines {patterns} patterns by allOf or beside $ref; combine at most {MAX_PATTERNS_AT_ONCE}",
            param=param,
        )
    levels = _levels(schema) + sum(_levels(target(schema, ref)) for ref in set(_references(schema)))
    if levels > MAX_SCHEMA_LEVELS:
        raise BadParameter(
            f"{param} is nested {levels} levels deep, its definitions included; send at most {MAX_SCHEMA_LEVELS}",
            param=param,
        )
    options = {"whitespace_pattern": _WHITE_SPACE, "coerce_one_of": True, "lenient": lenient}
    text = json.dumps({**schema, "x-guidance": options})
    if len(text) > MAX_SCHEMA_BYTES:
        raise BadParameter(f"{param} has {len(text)} bytes; send at most {MAX_SCHEMA_BYTES}", param=param)
    return f"%json {text}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _reason(matcher: LLMatcher) -> str:
    """The library's words on one line, without our own notation around the schema."""
    text = _EXCERPT.split(matcher.get_error().replace("<non-verbose/>", ""))[0]
    text = _PLACE.sub("", " ".join(text.split()))[:300]
    return "it allows no text at all" if text in {"", "NoExtension", "NoExtensionBias"} else text


_EXCERPT = re.compile(r"^ *[0-9]+ \| ", re.MULTILINE)
_PLACE = re.compile(r"^(at [0-9]+\([0-9]+\): )?(failed to compile JSON schema: |failed to parse \"%json\": )?")


def _walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Every value inside and how deep it lies."""
    waiting = [(value, 1)]
    while waiting:
        item, level = waiting.pop()
        yield item, level
        inner = item.values() if isinstance(item, Mapping) else item if isinstance(item, list) else ()
        waiting.extend((child, level + 1) for child in inner)


def _levels(value: Any) -> int:
    return max(level for _, level in _walk(value))


def _references(schema: Any) -> Iterator[str]:
    for item, _ in _walk(schema):
        if isinstance(item, Mapping) and isinstance(item.get("$ref"), str):
            yield item["$ref"]


def _patterns_at_once(schema: Any) -> int:
    """At least as many patterns as can meet in one text."""
    patterns = branches = 0
    for item, _ in _walk(schema):
        if isinstance(item, Mapping):
            has_pattern = "pattern" in item or "format" in item
            patterns += has_pattern
            branches += len(item["allOf"]) if isinstance(item.get("allOf"), list) else 0
            branches += has_pattern and not _COMBINING.isdisjoint(item)
    return min(patterns, branches)


_COMBINING = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
