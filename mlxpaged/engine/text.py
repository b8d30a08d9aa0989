"""A reply's ids become its text. Owns one request's detokeniser, what is held back, and its stop strings; knows nothing
of threads, scheduling or wire formats."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.tokenizer import Tokenizer
from ..sched.requests import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be shown now, the logprobs of the tokens it completes, and the stop string that ended the reply."""

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str | None = None


class TextStream:
    """Holds back an unfinished UTF-8 sequence and the longest suffix that could still become a stop string; nothing
    more. A stop string may span tokens or lie inside one; the text is cut at the earliest match."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._detokenizer = tokenizer.detokenizer(
            sampling.skip_special_tokens, sampling.continues_text, sampling.shown_special_ids
        )
        self._stops = tuple(stop for stop in sampling.stop if stop)
        self._min_tokens = sampling.min_tokens
        self._marker = sampling.stop_until or sampling.stop_after  # the next one that changes whether stops count
        self._rest = (sampling.stop_after,) if sampling.stop_until and sampling.stop_after else ()
        self._armed = bool(sampling.stop_until) or not sampling.stop_after
        self._recent: list[int] = []
        self._tokens = 0
        self._held = ""
        self._released = 0  # characters
        self._waiting: list[tuple[int, int, TokenLogprob]] = []  # (text from, shown when so much is out, logprob)

    def add(self, token_id: int, logprob: TokenLogprob | None = None) -> Piece:
        """The next id of the reply."""
        self._tokens += 1
        start = self._released + len(self._held)
        text = self._detokenizer.add(token_id)
        if logprob is not None:
            # A token without text of its own yet goes out with the text that completes it.
            self._waiting.append((start, start + max(len(text), 1), logprob))
        was_armed = self._armed
        self._watch_marker(token_id)
        if not (was_armed and self._armed):
            return self._release(self._held + text, "")
        return self._match(self._held + text)

    def finish(self) -> Piece:
        """The reply ended: everything held back, an unfinished sequence as U+FFFD."""
        text = self._held + self._detokenizer.finish()
        piece = self._match(text) if self._armed else Piece(text)
        if piece.stop is not None:
            return piece
        rest = piece.text + self._held if self._armed else text
        self._held = ""
        logprobs = piece.logprobs + tuple(logprob for _, _, logprob in self._waiting)
        self._waiting = []
        return Piece(rest, logprobs)

    def _watch_marker(self, token_id: int) -> None:
        if not self._marker:
            return
        self._recent = [*self._recent, token_id][-len(self._marker) :]
        if tuple(self._recent) == self._marker:
            self._armed = not self._armed
            self._marker, self._rest = (self._rest[0], ()) if self._rest else ((), ())

    def _match(self, text: str) -> Piece:
        if self._tokens < self._min_tokens or not self._stops:
            return self._release(text, "")
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            cut = self._released + place
            shown = tuple(logprob for start, _, logprob in self._waiting if start < cut)
            self._held, self._waiting = "", []
            return Piece(text[:place], shown, stop)
        keep = max(_overlap(text, stop) for stop in self._stops)
        return self._release(text[: len(text) - keep], text[len(text) - keep :])

    def _release(self, text: str, held: str) -> Piece:
        self._held = held
        self._released += len(text)
        out = 0
        while out < len(self._waiting) and self._waiting[out][1] <= self._released:
            out += 1
        shown, self._waiting = self._waiting[:out], self._waiting[out:]
        return Piece(text, tuple(logprob for _, _, logprob in shown))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
