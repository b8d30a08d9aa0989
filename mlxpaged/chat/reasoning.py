"""Where a model's thinking begins and ends. Owns the tags by which families mark it and the state machine that tells
thinking from the answer; knows nothing of tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .messages import Messages
from .source import Out, Reading, Source, ahead, until


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The texts around a model's thinking."""

    start: str
    end: str


_KNOWN = (
    ThinkTags("<think>", "</think>"),
    ThinkTags("[THINK]", "[/THINK]"),
    ThinkTags("<|channel>thought", "<channel|>"),
    ThinkTags("<seed:think>", "</seed:think>"),
    ThinkTags("<longcat_think>", "</longcat_think>"),
    ThinkTags("<|think:start|>", "<|think:end|>"),
    ThinkTags("<thinking>", "</thinking>"),
)


def think_tags(template: str, is_token: Callable[[str], bool]) -> ThinkTags | None:
    """The tags a model thinks in, by its template or else its vocabulary; None for a model that does not think.
    `is_token`: whether a text is one token of the vocabulary."""
    for tags in _KNOWN:
        if tags.end in template:
            return tags
    return next((tags for tags in _KNOWN[:-1] if is_token(tags.start) and is_token(tags.end)), None)


def opened_by(prompt: str, conversation: Messages, tags: ThinkTags) -> bool:
    """Whether the prompt itself opens the thinking: the template wrote the first tag, or the message to be continued
    stands inside."""
    if conversation.continue_final_message:
        last = str(conversation.messages[-1].get("content") or "")
        return last.rfind(tags.start) > last.rfind(tags.end)
    return prompt.rstrip().endswith(tags.start)


def closed_by(prompt: str, conversation: Messages, tags: ThinkTags) -> bool:
    """Whether the prompt says that there is no thinking to come: an empty block, or an answer to be continued."""
    if conversation.continue_final_message:
        return not opened_by(prompt, conversation, tags)
    return prompt.rstrip().endswith(tags.end)


def read_thinking(source: Source, out: Out, tags: ThinkTags, opened: bool) -> Reading[None]:
    """The thinking at a reply's start, where there is any; the answer is left unread. `opened`: the prompt holds the
    first tag already. White space inside and outside of the tags is dropped."""
    source.mark()
    found = yield from ahead(source, tags.start)
    if found:
        source.take(len(tags.start))
    elif not opened:
        source.rewind()
        return
    source.settle()
    out.thinking = True
    trimmed = _Trimmed(out)
    if (yield from until(source, tags.end, emit=trimmed.add)):
        source.take(len(tags.end))
    out.end_reasoning()


class _Trimmed:
    """Reasoning without the white space around it."""

    def __init__(self, out: Out) -> None:
        self._out, self._space, self._begun = out, "", False

    def add(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self._out.reasoning(self._space + body if self._begun else body.lstrip())
            self._begun, self._space = True, ""
        self._space += text[len(body) :]
