"""What `mlxpaged chat` shows. Owns where each kind of line goes (replies: stdout; the rest: stderr) and how: markdown
in a terminal, plain text elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..chat.foreign import neutralise
from .terminal import is_plain

if TYPE_CHECKING:
    from ..chat.sessions import Message, Session
    from ..engine.events import Progress, Timing, Usage


_RECAP_LINES = 20
_CUT_SHORT = {
    "streaming": "interrupted",
    "interrupted": "interrupted",
    "stopped": "stopped",
    "cut": "cut at its longest",
    "error": "broken off",
}


class ReplyView(Protocol):
    """One reply while it arrives."""

    def feed(self, text: str) -> None: ...

    def refresh(self) -> None:
        """Shows what `feed` held back, for a smooth picture, when no more text came."""
        ...

    def status(self, text: str) -> None:
        """A passing word on what the engine does before the first text."""
        ...

    def finish(self) -> None: ...


class PlainView:
    """A reply as plain text, as it comes."""

    def __init__(self) -> None:
        self._neutral = sys.stdout.isatty()
        self._fed = False

    def feed(self, text: str) -> None:
        self._fed = True
        sys.stdout.write(neutralise(text) if self._neutral else text)
        sys.stdout.flush()

    def refresh(self) -> None:
        """Plain output holds nothing back."""

    def status(self, text: str) -> None:
        """Plain output has no line that can be taken back."""

    def finish(self) -> None:
        if self._fed:
            sys.stdout.write("\n")
            sys.stdout.flush()


class Page:
    """The output side of a chat. `quiet`: nobody watches (stdin is a pipe), so only replies and errors are said."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._plain = quiet or is_plain(sys.stdout, dict(os.environ))
        self._kept: deque[str] = deque()
        self._dim = not is_plain(sys.stderr, dict(os.environ))

    def reply(self) -> ReplyView:
        if self._plain:
            return PlainView()
        from .markdown import MarkdownStream

        return MarkdownStream(sys.stdout)

    def recap(self, session: Session, turns: Sequence[Message]) -> None:
        """Where a conversation stands that is gone on with: its name and its last exchange."""
        if self.quiet or not turns:
            return
        self._print(f"{session.title} · {len(turns)} turns")
        last = next((index for index in reversed(range(len(turns))) if turns[index].role == "user"), 0)
        for turn in turns[last:]:
            if turn.role == "user":
                self._print("\n".join(f"> {line}" for line in turn.content.split("\n")[:_RECAP_LINES]))
            elif turn.content:
                view = self.reply()
                view.feed(turn.content)
                view.finish()
        if turns[-1].role == "user":
            self._print("Your last message got no reply; /continue asks for it.")
        elif turns[-1].state != "done":
            self._print(f"This reply was {_CUT_SHORT[turns[-1].state]}; /continue goes on with it.")
        self.gap()

    def say(self, text: str) -> None:
        """Lines for the person, beside the conversation."""
        if not self.quiet:
            self._print(text)

    def later(self, text: str) -> None:
        """A line for the next quiet moment: a prompt or a reply may be on the screen. From any thread."""
        self._kept.append(text)

    def say_kept(self) -> None:
        """Says what `later` kept: the moment is quiet."""
        while self._kept:
            self.warn(self._kept.popleft())

    def warn(self, text: str) -> None:
        """A line that matters even when nobody watches."""
        self._print(text if not self.quiet else f"mlxpaged: {text}")

    def _print(self, text: str) -> None:
        text = _wrapped(neutralise(text)) if sys.stderr.isatty() else neutralise(text)
        print(f"\x1b[2m{text}\x1b[0m" if self._dim else text, file=sys.stderr, flush=True)

    def gap(self) -> None:
        """A blank line between turns, where a person reads them."""
        if not self.quiet:
            print(file=sys.stderr, flush=True)


def _wrapped(text: str) -> str:
    """Lines too long for the terminal, broken between words; the others as they are."""
    width = max(20, shutil.get_terminal_size().columns - 1)
    return "\n".join(
        line if len(line) <= width else textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


def progress_words(progress: Progress) -> str:
    """The passing line before the first text: how many go before, then how far the prompt is read."""
    match progress.queue_position:
        case None:
            return f"reading: {progress.computed:,} of {progress.total:,} tokens"
        case 0:
            return "waiting, next in line"
    return f"waiting, {progress.queue_position} ahead"


def figures(usage: Usage, timing: Timing | None, context_len: int | None) -> str:
    """The line after a reply: time to first token, rate, tokens, cached tokens, context in use."""
    used = usage.prompt_tokens + usage.completion_tokens
    parts = []
    if timing:
        parts.append(f"ttft {timing.ttft_s:.2f} s")
        if rate := timing.tokens_per_s(usage.completion_tokens):
            parts.append(f"{rate:.1f} tok/s")
    parts.append(f"{usage.completion_tokens:,} token{'s' * (usage.completion_tokens != 1)}")
    parts.append(f"cached {usage.cached_tokens:,}/{usage.prompt_tokens:,}")
    parts.append(f"ctx {used:,}" + (f"/{context_len:,}" if context_len else ""))
    return " · ".join(parts)
