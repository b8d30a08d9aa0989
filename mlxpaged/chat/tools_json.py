"""Tool calls written as JSON. Owns the call object `{"name": ..., "arguments": {...}}` and the families that write it
without an end tag: llama 3 and mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from .json_scan import JsonScan, string, text_value, value
from .source import Broken, Out, Reading, Source, ahead, until

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""What a function may be called."""

_LETTERS = re.compile(r"[A-Za-z0-9_.:/-]*")
_ARGUMENTS = {"arguments", "parameters"}
_BESIDE = {"type", "id"}
_PYTHON_TAG = "<|python_tag|>"
_CALLS = "[TOOL_CALLS]"


def read_llama(source: Source, out: Out, names: Collection[str]) -> Reading[None]:
    """llama 3: the whole reply is one call object of a known tool, or several with `;` between them."""
    while True:
        source.mark()
        try:
            if (yield from ahead(source, _PYTHON_TAG)):
                source.take(len(_PYTHON_TAG))
            yield from call_object(source, out, names)
        except Broken:
            yield from broken_off(source, out)
            break
        out.end_call()
        if (yield from ahead(source, ";")):
            source.take(1)
    yield from until(source, emit=out.content)


def read_mistral(source: Source, out: Out) -> Reading[None]:
    """mistral: a mark, then a list of call objects, or `name[ARGS]{...}`; the mark may come again."""
    while (yield from until(source, _CALLS, emit=out.content)):
        source.mark()
        source.take(len(_CALLS))
        try:
            if (yield from ahead(source, "[")):
                yield from _list(source, out)
            else:
                name = yield from word(source)
                if (yield from expect(source, "[ARGS]", "[CALL_ID]", leave=("{",))) == "[CALL_ID]":
                    yield from word(source)
                    yield from expect(source, "[ARGS]", leave=("{",))
                yield from arguments(source, out, name)
                out.end_call()
        except Broken:
            yield from broken_off(source, out)
            out.content(source.take(1))  # looking on behind the start of what was no call
    source.settle()


def _list(source: Source, out: Out) -> Reading[None]:
    mark = yield from expect(source, "[")
    while mark != "]":
        yield from call_object(source, out)
        out.end_call()
        source.mark()
        mark = yield from expect(source, ",", "]")
    source.settle()


def call_object(source: Source, out: Out, names: Collection[str] | None = None) -> Reading[None]:
    """One call object, up to its last brace. It is a call as soon as its name is known (and among `names`, where
    given) and its arguments have begun as JSON does; whatever breaks it before, raises Broken. A call whose arguments
    are complete stays one, also where the object around it is not closed."""
    name: str | None = None
    waiting: str | None = None  # arguments that came before the name
    mark = yield from expect(source, "{")
    while mark != "}":
        key = yield from string(source)
        yield from expect(source, ":")
        if key == "name" and name is None:
            name = _checked((yield from string(source)), names)
        elif key not in _ARGUMENTS or waiting is not None:
            if names is not None and name is None and key not in _BESIDE:
                raise Broken
            yield from text_value(source)
        elif name is not None and (yield from ahead(source, "{")):
            yield from arguments(source, out, name)
            yield from _rest(source)
            return
        else:
            waiting = _as_object((yield from text_value(source)))
        mark = yield from expect(source, ",", "}")
    if name is None:
        raise Broken
    start(source, out, name)
    out.arguments(waiting or "{}")


def _rest(source: Source) -> Reading[None]:
    """What an object holds behind its arguments."""
    while (mark := (yield from ahead(source, ",", "}"))) == ",":
        source.take(1)
        try:
            yield from string(source)
            yield from expect(source, ":")
            yield from text_value(source)
        except Broken:
            return
    source.take(len(mark or ""))


def arguments(source: Source, out: Out, name: str) -> Reading[None]:
    """The arguments of a call of `name`, held until their first value has begun, then passed on as they come."""
    held: list[str] = []

    def emit(text: str, scan: JsonScan) -> None:
        if out.in_call:
            out.arguments(text)
            return
        held.append(text)
        if scan.num_values > 1 or scan.done:
            start(source, out, name)
            out.arguments("".join(held))

    if not name or (yield from ahead(source, "{")) is None:
        raise Broken
    yield from value(source, emit)


def start(source: Source, out: Out, name: str) -> None:
    """From here on the text is a call, whatever follows."""
    source.settle()
    out.start_call(name)


def broken_off(source: Source, out: Out, *ends: str) -> Reading[None]:
    """After Broken: a call that had begun gets the rest of its text, up to one of `ends`, as the model wrote it;
    otherwise the text is unread again."""
    if out.in_call:
        yield from until(source, *ends, emit=out.arguments)
        out.end_call()
    source.rewind()


def expect(source: Source, *marks: str, leave: tuple[str, ...] = ()) -> Reading[str]:
    """Take one of `marks`, and the white space before it; one of `leave` may come as well and is left unread. Raises
    Broken where something else comes."""
    mark = yield from ahead(source, *marks, *leave)
    if mark is None:
        raise Broken
    if mark not in leave:
        source.take(len(mark))
    return mark


def word(source: Source) -> Reading[str]:
    """A name; Broken where none comes."""
    name = ""
    while True:
        found = _LETTERS.match(source.unread)
        name += source.take(found.end() if found else 0)
        if source.unread or source.ended:
            return _checked(name, None)
        if len(name) > 128:
            raise Broken
        yield


def _checked(name: str, names: Collection[str] | None) -> str:
    if not NAME.fullmatch(name) or (names is not None and name not in names):
        raise Broken
    return name


def _as_object(text: str) -> str:
    """Arguments as an object's text: some models write that text as a JSON string, or null for none."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            text, value = value.strip(), json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Broken from error
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Broken
    return text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
