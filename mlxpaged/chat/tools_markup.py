"""Tool calls written as markup. Owns the bodies of qwen-coder, glm and gemma calls, told as JSON arguments while they
come; a parameter's declared type says whether its text is a string."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .source import Broken, Out, Reading, Source, ahead, until
from .tools_json import call_object, expect, start, word

Properties = Mapping[str, Mapping[str, Any]]
"""Tool name -> its parameters' schemas by name."""

_MAX_DEPTH = 100
_BARE = re.compile(r"[^,:{}\[\]<]*")


def read_tagged(
    source: Source, out: Out, tags: tuple[str, str], body: Callable[[Source, Out], Reading[None]]
) -> Reading[None]:
    """Content with calls between two tags. `body` reads one call and leaves the end tag; every family may write a
    plain call object there instead. Text that is no call stays content, its tags too."""
    opening, closing = tags
    while (yield from until(source, opening, emit=out.content)):
        source.mark()
        source.take(len(opening))
        try:
            if (yield from ahead(source, "{")):
                yield from call_object(source, out)
            else:
                yield from body(source, out)
        except Broken:
            yield from _give_up(source, out, closing)
            continue
        yield from _behind(source, out, opening, closing)
    source.settle()


def _give_up(source: Source, out: Out, closing: str) -> Reading[None]:
    if not out.in_call:
        source.rewind()
        out.content(source.take(1))
        return
    yield from until(source, closing, emit=out.arguments)
    out.end_call()
    source.take(len(closing))


def _behind(source: Source, out: Out, opening: str, closing: str) -> Reading[None]:
    """The end tag. Braces too many are dropped; other text before it, or in place of it, is content."""
    out.end_call()
    stray: list[str] = []
    found = yield from until(source, closing, opening, emit=stray.append)
    if found == closing:
        source.take(len(closing))
    if text := "".join(stray).strip(" \t\r\n}]"):
        out.content(text)


class _Members:
    """An object's text, member by member."""

    def __init__(self, source: Source, out: Out, name: str) -> None:
        self._source, self._out, self._name = source, out, name

    def key(self, key: str) -> None:
        begun = self._out.in_call
        if not begun:
            start(self._source, self._out, self._name)
        self._out.arguments((", " if begun else "{") + json.dumps(key, ensure_ascii=False) + ": ")

    def end(self) -> None:
        begun = self._out.in_call
        if not begun:
            start(self._source, self._out, self._name)
        self._out.arguments("}" if begun else "{}")


def read_qwen_coder(source: Source, out: Out, properties: Properties) -> Reading[None]:
    """`<function=name> <parameter=key>\\nvalue\\n</parameter> ... </function>`"""
    yield from expect(source, "<function=")
    name = yield from word(source)
    yield from expect(source, ">")
    members = _Members(source, out, name)
    while (yield from expect(source, "<parameter=", "</function>", leave=("</tool_call>",))) == "<parameter=":
        key = yield from _up_to(source, ">")
        members.key(key)
        yield from _parameter(source, out, properties.get(name, {}).get(key), "\n</parameter>", "</parameter>")
    members.end()


def read_glm(source: Source, out: Out, properties: Properties) -> Reading[None]:
    """`name <arg_key>key</arg_key> <arg_value>value</arg_value> ... </tool_call>`"""
    name = yield from word(source)
    members = _Members(source, out, name)
    while (yield from expect(source, "<arg_key>", leave=("</tool_call>",))) == "<arg_key>":
        key = yield from _up_to(source, "</arg_key>")
        yield from expect(source, "<arg_value>")
        members.key(key)
        yield from _parameter(source, out, properties.get(name, {}).get(key), "</arg_value>")
    members.end()


def _up_to(source: Source, mark: str) -> Reading[str]:
    pieces: list[str] = []
    if (yield from until(source, mark, emit=pieces.append)) is None:
        raise Broken
    source.take(len(mark))
    return "".join(pieces).strip()


def _parameter(source: Source, out: Out, schema: Any, *ends: str) -> Reading[None]:
    """One value up to one of `ends`. A string is passed on as it comes, anything else once it is whole."""
    while not source.unread and not source.ended:
        yield
    if len(ends) > 1 and source.unread.startswith("\n"):  # a line of its own
        source.take(1)
    if _is_string(schema):
        out.arguments('"')
        found = yield from until(source, *ends, emit=lambda text: out.arguments(_escaped(text)))
        if found is None:
            raise Broken
        out.arguments('"')
        source.take(len(found))
    else:
        pieces: list[str] = []
        found = yield from until(source, *ends, emit=pieces.append)
        if found is None:
            raise Broken
        out.arguments(_as_json("".join(pieces)))
        source.take(len(found))


def _is_string(schema: Any) -> bool:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return kind == "string" or (isinstance(kind, list) and "string" in kind and set(kind) <= {"string", "null"})


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    """A value's text as it is where it is JSON, else as a string; Python's words for the constants count too."""
    bare = text.strip()
    bare = {"True": "true", "False": "false", "None": "null"}.get(bare, bare)
    try:
        return json.dumps(json.loads(bare, parse_constant=_refuse), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> Any:
    raise ValueError(name)


def read_gemma(source: Source, out: Out, quote: str) -> Reading[None]:
    """`call:name{key:value,...}`: bare keys, strings between two `quote` marks, numbers, lists and objects."""
    yield from expect(source, "call:")
    name = yield from word(source)
    yield from _Gemma(source, out, quote, name).object()


class _Gemma:
    """The arguments of one call; it is one once its first key or its end has been seen."""

    def __init__(self, source: Source, out: Out, quote: str, name: str) -> None:
        self._source, self._out, self._quote, self._name = source, out, quote, name
        self._depth = 0

    def object(self) -> Reading[None]:
        yield from expect(self._source, "{")
        yield from self._items("{", "}", self._member)

    def _items(self, opening: str, closing: str, item: Callable[[str], Reading[None]]) -> Reading[None]:
        """What stands between two brackets, of which the first is taken. `item` gets the text before it."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Broken
        mark, before = ",", opening
        if (yield from ahead(self._source, closing)):
            self._source.take(1)
            self._emit(opening)
            mark = closing
        while mark == ",":
            yield from item(before)
            mark, before = (yield from expect(self._source, ",", closing)), ", "
        self._emit(closing)
        self._depth -= 1

    def _member(self, before: str) -> Reading[None]:
        key = yield from self._key()
        self._emit(before + json.dumps(key, ensure_ascii=False) + ": ")
        yield from self._value("")

    def _key(self) -> Reading[str]:
        if (yield from ahead(self._source, self._quote)):
            self._source.take(len(self._quote))
            key = yield from _up_to(self._source, self._quote)
            yield from expect(self._source, ":")
            return key
        pieces: list[str] = []
        if (yield from until(self._source, ":", ",", "{", "}", emit=pieces.append)) != ":":
            raise Broken
        self._source.take(1)
        return "".join(pieces).strip().strip('"')

    def _value(self, before: str) -> Reading[None]:
        self._emit(before)
        match (yield from ahead(self._source, self._quote, "{", "[")):
            case "{":
                yield from self.object()
            case "[":
                self._source.take(1)
                yield from self._items("[", "]", self._value)
            case None:
                yield from self._bare()
            case _:
                yield from self._string()

    def _string(self) -> Reading[None]:
        self._source.take(len(self._quote))
        self._emit('"')
        if (yield from until(self._source, self._quote, emit=lambda text: self._emit(_escaped(text)))) is None:
            raise Broken
        self._source.take(len(self._quote))
        self._emit('"')

    def _bare(self) -> Reading[None]:
        """A number, a constant, or a string without its quotes."""
        text = ""
        while True:
            found = _BARE.match(self._source.unread)
            text += self._source.take(found.end() if found else 0)
            if self._source.unread or self._source.ended:
                break
            yield
        if not text.strip():
            raise Broken
        self._emit(_as_json(text.strip()))

    def _emit(self, text: str) -> None:
        if not self._out.in_call:
            start(self._source, self._out, self._name)
        self._out.arguments(text)
