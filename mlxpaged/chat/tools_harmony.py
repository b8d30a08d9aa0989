"""gpt-oss's format: a reply of several messages, each with a channel and perhaps a recipient. Owns which message is
thinking, answer or call."""

from __future__ import annotations

import re
from collections.abc import Callable

from .source import Broken, Out, Reading, Source, ahead, until
from .tools_json import arguments, broken_off

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
"""Special tokens whose text this reader must see."""

FINAL = "<|channel|>final<|message|>"
"""What stands in front of the answer; stop strings are armed behind it."""

_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.:/-]{1,128})")


def read_harmony(source: Source, out: Out, with_tools: bool) -> Reading[None]:
    """A whole reply. Text without a header is the answer. Without `with_tools` a call's text is the answer too."""
    while source.unread or not source.ended:
        source.mark()
        header = yield from _header(source)
        if header is None:
            source.rewind()
            yield from _body(source, out.content)
            continue
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient and with_tools:
            yield from _call(source, out, recipient[1])
        elif channel and channel[1] == "analysis":
            source.settle()
            yield from _body(source, out.reasoning)
            out.end_reasoning()
        else:
            source.settle()
            yield from _body(source, out.content)


def _header(source: Source) -> Reading[str | None]:
    """The header of a message, taken with its last mark; None where plain text comes instead. One that is cut off says
    nothing; one that is ended by another mark is text without its marks."""
    first = yield from ahead(source, "<|start|>", "<|channel|>", "<|message|>", "to=")
    if first is None:
        return None
    pieces: list[str] = []
    found = yield from until(source, "<|message|>", "<|end|>", "<|call|>", emit=pieces.append)
    if found == "<|message|>":
        source.take(len(found))
        return "".join(pieces)
    if first == "to=":
        return None
    if found is None:
        return ""
    source.rewind()
    source.take(len(first))
    return None


def _body(source: Source, emit: Callable[[str], object]) -> Reading[None]:
    """A message's text and its end mark. A message that begins without the last one's end is left unread."""
    found = yield from until(source, *_ENDS, emit=emit)
    if found is not None and found not in {"<|start|>", "<|channel|>"}:
        source.take(len(found))


def _call(source: Source, out: Out, name: str) -> Reading[None]:
    try:
        yield from arguments(source, out, name)
        out.end_call()
        yield from _body(source, out.content)
    except Broken:
        was_call = out.in_call
        yield from broken_off(source, out, *_ENDS)
        if not was_call:
            yield from _body_of_broken(source, out)


def _body_of_broken(source: Source, out: Out) -> Reading[None]:
    """The text of a call that is none, without its header."""
    pieces: list[str] = []
    yield from until(source, "<|message|>", emit=pieces.append)
    source.take(len("<|message|>"))
    yield from _body(source, out.content)
