"""How the OpenAI endpoints word a reply: chunks, bodies, logprobs, usage. Pure translation from Delta; knows no
socket, no engine and no clock.

The rules that clients break on when they are missed: one id, created and model for all chunks; the first delta of
each index carries the role and an empty content; one finish_reason per index, in a chunk without content; usage in a
chunk of its own with empty `choices`, only when asked for; `[DONE]` last.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..engine.events import Delta, Progress, Timing, Usage
from ..sched.requests import TokenLogprob
from .sse import DONE, event

LEAST_LOGPROB = -9999.0
"""What minus infinity is written as: JSON has no word for it."""

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Asked:
    """What every chunk of one response repeats, and what the client wants in it. `prompt_tokens` holds the length of
    each prompt; choice `i` belongs to prompt `i // n`. `echo` holds each prompt's text, where asked for, and
    `echo_ids` its ids, where their logprobs are."""

    id: str
    created: int
    model: str
    fingerprint: str
    prompt_tokens: tuple[int, ...]
    n: int = 1
    logprobs: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    progress: bool = False
    timings: bool = False
    echo: tuple[str, ...] = ()
    echo_ids: tuple[tuple[int, ...], ...] = ()


class Dialect:
    """One response in the words of one endpoint, streamed (`opening`, `event` per delta, `closing`) or whole
    (`take` per delta, then `body`). The subclasses differ only in where text and logprobs lie."""

    object_name: str
    chunk_name: str

    def __init__(self, asked: Asked, token_bytes: TokenBytes) -> None:
        self.asked = asked
        self._token_bytes = token_bytes
        self._choices = [Choice() for _ in range(asked.n * len(asked.prompt_tokens))]

    def opening(self) -> Iterator[bytes]:
        """What goes out at once, before any token exists."""
        raise NotImplementedError

    def event(self, index: int, delta: Delta) -> Iterator[bytes]:
        """The chunks of one delta: progress, text, finish; often one, sometimes none."""
        yield from self._progress_event(delta)
        extra = self._token_ids(delta)
        if delta.text or delta.logprobs or extra:
            yield self._chunk(index, self._piece(index, delta) | {"finish_reason": None} | extra, delta)
        self.take(index, delta)
        if delta.finish:
            stopped = {} if delta.stop_reason is None else {"stop_reason": delta.stop_reason}
            yield self._chunk(index, self._ending() | {"finish_reason": delta.finish.value} | stopped, delta)

    def take(self, index: int, delta: Delta) -> None:
        """Remember what choice `index` said."""
        self._choices[index].add(delta)

    def closing(self) -> Iterator[bytes]:
        """What follows the last choice's end."""
        if self.asked.include_usage:
            yield event(self._head(self.chunk_name) | {"choices": [], "usage": self._usage()})
        yield DONE

    def body(self) -> dict[str, Any]:
        """The whole response, once every delta was taken."""
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        body = self._head(self.object_name) | {"choices": choices, "usage": self._usage()}
        if self.asked.timings and (timing := self._choices[0].timing):
            body["timings"] = _timings(timing, self._choices[0].usage)
        return body

    def _progress_event(self, delta: Delta) -> Iterator[bytes]:
        if delta.progress and self.asked.progress:
            yield event(self._head(self.chunk_name) | {"choices": [], "prompt_progress": _progress(delta.progress)})

    def _token_ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": list(delta.token_ids)} if self.asked.token_ids and delta.token_ids else {}

    def _piece(self, index: int, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _ending(self) -> dict[str, Any]:
        raise NotImplementedError

    def _message(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _head(self, object_name: str) -> dict[str, Any]:
        asked = self.asked
        return {
            "id": asked.id,
            "object": object_name,
            "created": asked.created,
            "model": asked.model,
            "system_fingerprint": asked.fingerprint,
        }

    def _chunk(self, index: int, fields: dict[str, Any], delta: Delta | None = None) -> bytes:
        chunk = self._head(self.chunk_name) | {"choices": [{"index": index, **fields}]}
        if self.asked.continuous_usage:
            chunk["usage"] = self._running_usage(index, delta)
        if self.asked.timings and delta and delta.finish and delta.timing:
            chunk["timings"] = _timings(delta.timing, delta.usage)
        return event(chunk)

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.finish is not None
        whole = {"index": index, **self._message(index, choice), "finish_reason": choice.finish}
        if choice.stop_reason is not None:
            whole["stop_reason"] = choice.stop_reason
        if self.asked.token_ids:
            whole["token_ids"] = choice.token_ids
        return whole

    def _usage(self) -> dict[str, Any]:
        """Each prompt counts once, however many replies it got; of its replies' cache hits the smallest counts."""
        n, usages = self.asked.n, [choice.usage or Usage(0, len(choice.token_ids), 0) for choice in self._choices]
        per_prompt = [usages[start : start + n] for start in range(0, len(usages), n)]
        cached = sum(min(usage.cached_tokens for usage in group) for group in per_prompt)
        return _usage(sum(self.asked.prompt_tokens), sum(usage.completion_tokens for usage in usages), cached)

    def _running_usage(self, index: int, delta: Delta | None) -> dict[str, Any]:
        choice = self._choices[index]
        new = len(delta.token_ids) if delta and choice.finish is None else 0
        prompt = self.asked.prompt_tokens[index // self.asked.n]
        return _usage(prompt, len(choice.token_ids) + new, choice.usage.cached_tokens if choice.usage else 0)


class CompletionDialect(Dialect):
    """`/v1/completions`."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def opening(self) -> Iterator[bytes]:
        for index in range(len(self._choices)):
            if (text := self._echo(index)) and not self.asked.echo_ids:
                yield self._chunk(index, {"text": text, "logprobs": None, "finish_reason": None})

    def event(self, index: int, delta: Delta) -> Iterator[bytes]:
        if self.asked.echo_ids and not self._choices[index].token_ids and (delta.token_ids or delta.finish):
            # The prompt's logprobs are complete with the first token of the reply, or with its end.
            echo = {"text": self._echo(index), "logprobs": self._prompt_logprobs(index), "finish_reason": None}
            yield self._chunk(index, echo)
        yield from super().event(index, delta)

    def _piece(self, index: int, delta: Delta) -> dict[str, Any]:
        start = len(self._echo(index)) + self._choices[index].num_characters
        return {"text": delta.text, "logprobs": self._logprobs(delta.logprobs or (), start)}

    def _ending(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _message(self, index: int, choice: Choice) -> dict[str, Any]:
        echo = self._echo(index)
        logprobs = self._logprobs(choice.logprobs, len(echo))
        if logprobs and self.asked.echo_ids:
            before = self._prompt_logprobs(index)
            logprobs = {name: before[name] + values for name, values in logprobs.items()}
        return {"text": echo + "".join(choice.texts), "logprobs": logprobs}

    def _echo(self, index: int) -> str:
        return self.asked.echo[index // self.asked.n] if self.asked.echo else ""

    def _logprobs(self, entries: Sequence[TokenLogprob], start: int) -> dict[str, Any] | None:
        """Four parallel lists; `text_offset` is where each token's text begins, in characters of `text`."""
        if not self.asked.logprobs:
            return None
        raws = [self._token_bytes(entry.token_id) for entry in entries]
        logprobs = [max(entry.logprob, LEAST_LOGPROB) for entry in entries]
        return {
            "tokens": [token_text(raw) for raw in raws],
            "token_logprobs": logprobs,
            "top_logprobs": [
                {token_text(raw): logprob} | self._best(entry)
                for raw, logprob, entry in zip(raws, logprobs, entries, strict=True)
            ],
            "text_offset": [start + offset for offset in _offsets(raws)[:-1]],
        }

    def _prompt_logprobs(self, index: int) -> dict[str, list[Any]]:
        """The lists for the prompt. Nothing precedes its first id, so that has no logprob. What the tokens spell and
        the prompt's text lacks (a bos id, a leading space) has no width."""
        ids = self.asked.echo_ids[index // self.asked.n]
        lists = self._logprobs(self._choices[index].prompt_logprobs, 0)
        assert lists is not None
        offsets = _offsets([self._token_bytes(token_id) for token_id in ids])
        extra = offsets[-1] - len(self._echo(index))
        lists["text_offset"] = [max(0, offset - extra) for offset in offsets[:-1]]
        first = {"tokens": self._text_of(ids[0]), "token_logprobs": None, "top_logprobs": None}
        return {name: [first[name], *values] if name in first else values for name, values in lists.items()}

    def _best(self, entry: TokenLogprob) -> dict[str, float]:
        return {self._text_of(token_id): max(value, LEAST_LOGPROB) for token_id, value in entry.top}

    def _text_of(self, token_id: int) -> str:
        return token_text(self._token_bytes(token_id))


class Choice:
    """What one choice has said so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.num_characters = 0
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        self.usage: Usage | None = None
        self.timing: Timing | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.num_characters += len(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.finish:
            self.finish, self.stop_reason = delta.finish.value, delta.stop_reason
            self.usage, self.timing = delta.usage, delta.timing


def token_text(raw: bytes) -> str:
    """A token's bytes as text; a piece of a character is spelled out, as OpenAI does: `bytes:\\xe2\\x96`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _offsets(raws: Sequence[bytes]) -> list[int]:
    """Where each token's text begins, in characters, and where the last one ends."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return list(accumulate((len(decoder.decode(raw)) for raw in raws), initial=0))


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _progress(progress: Progress) -> dict[str, int]:
    counts = {"total": progress.total, "cache": progress.cached, "processed": progress.computed}
    return counts if progress.queue_position is None else counts | {"queue_position": progress.queue_position}


def _timings(timing: Timing, usage: Usage | None) -> dict[str, float]:
    completion_tokens = usage.completion_tokens if usage else 0
    return {
        "queued_ms": timing.queued_s * 1000,
        "ttft_ms": timing.ttft_s * 1000,
        "total_ms": timing.total_s * 1000,
        "predicted_n": completion_tokens,
        "predicted_per_second": timing.tokens_per_s(completion_tokens),
    }
