"""Every live request's way from events to its sink: text, usage, timing. Owns the requests' text streams; knows nothing
of steps or mlx. Opened from any thread, everything else on the engine thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..model.tokenizer import Tokenizer
from ..sched.events import EndEvent, Event, PromptEvent, TokenEvent
from ..sched.requests import FinishReason, Request
from .events import Delta, Progress, Sink, Timing, Usage
from .text import Piece, TextStream

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Reply:
    """One request's reply so far. Times are of the monotonic clock."""

    request: Request
    text: TextStream
    sink: Sink
    opened: float
    started: float | None = None
    place: int | None = None
    first_token: float | None = None
    tokens: int = 0
    cached: int = 0

    def usage(self) -> Usage:
        return Usage(len(self.request.prompt), self.tokens, self.cached)

    def timing(self, now: float) -> Timing:
        return Timing((self.started or now) - self.opened, (self.first_token or now) - self.opened, now - self.opened)


@dataclass
class Replies:
    """The live replies by request id."""

    _live: dict[int, Reply] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self._live)

    def live(self) -> list[Reply]:
        with self._lock:
            return list(self._live.values())

    def open(self, request: Request, tokenizer: Tokenizer, sink: Sink) -> None:
        reply = Reply(request, TextStream(tokenizer, request.sampling), sink, time.monotonic())
        with self._lock:
            self._live[request.request_id] = reply

    def take(self, events: Sequence[Event]) -> list[int]:
        """Pass events on; returns the requests that ended here (by a stop string, or a fault of their text) and must be
        cancelled in the scheduler."""
        stopped = []
        for event in events:
            reply = self._live.get(event.request_id)
            if reply is None:
                continue
            try:
                if self._take(reply, event):
                    stopped.append(event.request_id)
            except Exception as error:  # of making its text: its own end, not that of those told after it
                log.exception("the text of request %d could not be made", event.request_id)
                self._finish(reply, (), Piece(""), FinishReason.ERROR, error=f"its text could not be made: {error}")
                stopped.append(event.request_id)
        return stopped

    def _take(self, reply: Reply, event: Event) -> bool:
        """Pass one event on; True when a stop string ended the reply."""
        match event:
            case TokenEvent():
                return self._token(reply, event)
            case PromptEvent(_, computed, total, cached, scores):
                reply.cached = cached
                reply.started = reply.started or time.monotonic()
                self._send(reply, Delta(progress=Progress(computed, total, cached), prompt_logprobs=scores))
            case EndEvent(request_id, finish, error):
                self.end(request_id, finish, error)
        return False

    def tell_places(self, places: Mapping[int, int]) -> None:
        """Tell those that wait for their first step how many go before them, where that has changed."""
        for request_id, place in places.items():
            reply = self._live.get(request_id)
            if reply is not None and reply.started is None and reply.place != place:
                reply.place = place
                self._send(reply, Delta(progress=Progress(0, len(reply.request.prompt), 0, place)))

    def end(self, request_id: int, finish: FinishReason, error: str | None = None) -> None:
        """Send the last delta; nothing happens when the request had ended."""
        reply = self._live.get(request_id)
        if reply is not None:
            self._finish(reply, (), reply.text.finish(), finish, error=error)

    def end_all(self, finish: FinishReason, error: str | None = None) -> None:
        for reply in self.live():
            self.end(reply.request.request_id, finish, error)

    def _token(self, reply: Reply, event: TokenEvent) -> bool:
        """One sampled id; True when a stop string ended the reply."""
        reply.tokens += 1
        reply.cached = event.cached_tokens
        if reply.first_token is None:
            reply.first_token = time.monotonic()
            reply.started = reply.started or reply.first_token
        ids = (event.token_id,)
        named = event.token_id in reply.request.sampling.stop_token_ids
        is_end = named or event.token_id in reply.request.end_token_ids
        if event.finish is FinishReason.STOP and is_end:  # an end token has no text of its own
            self._finish(reply, ids, reply.text.finish(), event.finish, event.token_id if named else None)
            return False
        piece = reply.text.add(event.token_id, event.logprob)
        if piece.stop is None and event.finish is not None:
            rest = reply.text.finish()
            piece = Piece(piece.text + rest.text, piece.logprobs + rest.logprobs, rest.stop)
        if piece.stop is not None:
            self._finish(reply, ids, piece, FinishReason.STOP, piece.stop)
            return event.finish is None
        if event.finish is not None:
            self._finish(reply, ids, piece, event.finish)
        else:
            self._send(reply, Delta(piece.text, ids, _asked(reply, piece)))
        return False

    def _finish(
        self,
        reply: Reply,
        ids: tuple[int, ...],
        piece: Piece,
        finish: FinishReason,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> None:
        with self._lock:
            self._live.pop(reply.request.request_id, None)
        self._send(
            reply,
            Delta(
                text=piece.text,
                token_ids=ids,
                logprobs=_asked(reply, piece),
                finish=finish,
                stop_reason=stop_reason,
                error=error,
                usage=reply.usage(),
                timing=reply.timing(time.monotonic()),
            ),
        )

    def _send(self, reply: Reply, delta: Delta) -> None:
        try:
            reply.sink(delta)
        except Exception:  # a face's fault must not end the engine or its neighbours
            log.exception("the sink of request %d raised", reply.request.request_id)


def _asked(reply: Reply, piece: Piece) -> tuple | None:
    return None if reply.request.sampling.logprobs is None else piece.logprobs
