"""JSON values inside a stream of text: where one ends, and the first character that cannot be. Owns the pushdown
automaton; builds no values of its own but strings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from .source import Broken, Reading, Source

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALARS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_LETTERS = frozenset("0123456789+-.eE")
_MAX_DEPTH = 200


class JsonScan:
    """Takes the text of one value, piece by piece. `done` once it is complete, `broken` where no value goes on so;
    `num_values` counts the values begun in it."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.num_values = 0
        self._closers: list[str] = []
        self._expect = "value"  # value, first (or a closer), key, first key, colon, next
        self._word: str | None = None  # an unfinished number or literal
        self._in_string = False
        self._escape = ""

    def feed(self, text: str, ended: bool = False) -> int:
        """How many characters belong to the value. `ended`: no more will come."""
        place = 0
        try:
            while place < len(text) and not self.done:
                if self._in_string:
                    place = self._string(text, place)
                elif self._word is not None:
                    place = self._letters(text, place)
                else:
                    self._structure(text[place])
                    place += 1
            if ended and self._word is not None and not self.done:
                self._end_word()
        except Broken:
            self.broken = True
        self.broken = self.broken or (ended and not self.done)
        return place

    def _string(self, text: str, place: int) -> int:
        letter = text[place]
        if self._escape:
            self._escape += letter
            unicode = self._escape[1] == "u"
            if letter not in ("0123456789abcdefABCDEF" if unicode and len(self._escape) > 2 else '"\\/bfnrtu'):
                raise Broken
            if len(self._escape) == (6 if unicode else 2):
                self._escape = ""
            return place + 1
        if plain := _PLAIN.match(text, place):
            return plain.end()
        if letter == "\\":
            self._escape = letter
        elif letter == '"':
            self._in_string = False
            self._after_value() if self._expect != "name" else self._set("colon")
        else:
            raise Broken
        return place + 1

    def _letters(self, text: str, place: int) -> int:
        assert self._word is not None
        letter = text[place]
        if letter in _NUMBER_LETTERS if self._word[0] in "-0123456789" else letter.isalpha():
            self._word += letter
            if self._word[0] not in "-0123456789" and not any(word.startswith(self._word) for word in _SCALARS):
                raise Broken
            return place + 1
        self._end_word()
        return place

    def _end_word(self) -> None:
        assert self._word is not None
        if self._word not in _SCALARS and not _NUMBER.fullmatch(self._word):
            raise Broken
        self._word = None
        self._after_value()

    def _structure(self, letter: str) -> None:
        match letter, self._expect:
            case _, _ if letter in _SPACE:
                return
            case ":", "colon":
                self._set("value")
            case ",", "next":
                self._set("key" if self._closers[-1] == "}" else "value")
            case (("}" | "]"), ("first" | "first key" | "next")) if letter == self._closers[-1]:
                self._closers.pop()
                self._after_value()
            case '"', ("key" | "first key"):
                self._in_string = True
                self._set("name")
            case _, ("value" | "first"):
                self._begin(letter)
            case _:
                raise Broken

    def _begin(self, letter: str) -> None:
        if letter in "{[":
            if len(self._closers) >= _MAX_DEPTH:
                raise Broken
            self._closers.append("}" if letter == "{" else "]")
            self._set("first key" if letter == "{" else "first")
        elif letter == '"':
            self._in_string = True
        elif letter in "-0123456789tfn":
            self._word = letter
        else:
            raise Broken
        self.num_values += 1

    def _after_value(self) -> None:
        self.done = not self._closers
        self._set("next")

    def _set(self, expect: str) -> None:
        self._expect = expect


def value(source: Source, emit: Callable[[str, JsonScan], object]) -> Reading[None]:
    """One JSON value, its text passed on as it comes. Raises Broken, after what came before, where it is none."""
    scan = JsonScan()
    while True:
        if size := scan.feed(source.unread, source.ended):
            emit(source.take(size), scan)
        if scan.broken:
            raise Broken
        if scan.done:
            return
        yield


def text_value(source: Source) -> Reading[str]:
    """One JSON value's text, whole."""
    pieces: list[str] = []
    yield from value(source, lambda text, _: pieces.append(text))
    return "".join(pieces).strip()


def string(source: Source) -> Reading[str]:
    """One JSON string."""
    text = yield from text_value(source)
    if not text.startswith('"'):
        raise Broken
    return str(json.loads(text))
