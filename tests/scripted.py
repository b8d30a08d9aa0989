"""A scripted engine: what each request answers is written down in advance, and when is up to the test.

It has EngineService's methods and stands behind a real LocalBackend and a real server. With `manual=True` nothing
moves until the test calls `step`; otherwise a thread steps as fast as it can. Tokens are bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from mlxpaged.engine.checking import require_room
from mlxpaged.engine.events import Delta, EngineStats, Loading, ModelInfo, RowStats, Sink, Timing, Usage
from mlxpaged.errors import BadParameter, PromptTooLong, UnsupportedModel
from mlxpaged.sched.requests import FinishReason, Grammar, SamplingParams, TokenLogprob

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 259
BOS, IM_START, IM_END = 256, 257, 258
_SPECIAL = {"<s>": BOS, "<|im_start|>": IM_START, "<|im_end|>": IM_END}


@dataclass(frozen=True)
class ByteTokenizer:
    """One id per byte, and three special ids; the methods of the real one that a backend calls."""

    chat_template: str | None = CHATML
    special_tokens: dict[str, str] = field(default_factory=lambda: {"bos_token": "<s>", "eos_token": "<|im_end|>"})
    end_token_ids: frozenset[int] = frozenset({IM_END})
    add_bos: bool = True

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        ids = [BOS] if add_special and self.add_bos else []
        while text:
            special = next((name for name in _SPECIAL if text.startswith(name)), None)
            if special:
                ids.append(_SPECIAL[special])
                text = text[len(special) :]
            else:
                end = min((text.find(name) for name in _SPECIAL if name in text), default=len(text))
                ids.extend(text[:end].encode())
                text = text[end:]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        ids = [token_id for token_id in ids if token_id < BOS or not skip_special]
        return b"".join(self.token_bytes(token_id) for token_id in ids).decode(errors="replace")

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def token_id(self, text: str) -> int | None:
        return _SPECIAL.get(text, ord(text) if len(text) == 1 and text.isascii() else None)

    def is_special(self, token_id: int) -> bool:
        return token_id >= BOS

    def token_bytes(self, token_id: int) -> bytes:
        names = {number: name for name, number in _SPECIAL.items()}
        return names[token_id].encode() if token_id in names else bytes([token_id])


def says(
    *texts: str,
    finish: FinishReason = FinishReason.STOP,
    stop_reason: str | int | None = None,
    error: str | None = None,
) -> list[Delta]:
    """One delta per text, its ids the text's bytes, then an end without text."""
    deltas = [Delta(text=text, token_ids=tuple(text.encode())) for text in texts]
    return [*deltas, Delta(finish=finish, stop_reason=stop_reason, error=error)]


def with_logprobs(deltas: Sequence[Delta], top: int = 0) -> list[Delta]:
    """The same, every id with a logprob of -0.5 and the `top` first letters as alternatives."""
    best = tuple((ord("a") + index, -1.0 - index) for index in range(top))
    return [
        replace(delta, logprobs=tuple(TokenLogprob(token_id, -0.5, best) for token_id in delta.token_ids))
        for delta in deltas
    ]


ScriptFor = Callable[[Sequence[int], SamplingParams], Sequence[Delta]]


@dataclass
class _Row:
    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    sink: Sink
    deltas: list[Delta]
    num_completion: int = 0
    cancelled: bool = False


@dataclass(frozen=True)
class ScriptedHandle:
    request_id: int
    cancel: Callable[[], None]


class ScriptedService:
    """Answers every request by `script(prompt_ids, sampling)`. `submitted` lists what came in, in order;
    `num_cancelled` counts the requests somebody cancelled. A load waits for running replies and, with `hold_loads`,
    for `finish_loads`; one of a name in `broken` fails. `loads` lists (name, whether it might be fetched)."""

    def __init__(
        self,
        script: ScriptFor = lambda prompt_ids, sampling: says("Hel", "lo"),
        manual: bool = False,
        max_rows: int = 32,
        max_queue: int = 512,
        context_len: int = 4096,
        loading: bool = False,
        hold_loads: bool = False,
        broken: Sequence[str] = (),
        **model: object,
    ) -> None:
        info = ModelInfo(
            name="scripted",
            context_len=context_len,
            max_prompt=context_len - 1,
            vocab_size=VOCAB_SIZE,
            tokenizer=ByteTokenizer(),
            created=1700000000,
        )
        self._info = replace(info, **model)
        self.model: ModelInfo | None = None if loading else self._info
        self.loading: Loading | None = Loading(self._info.name) if loading else None
        self.alive = True
        self.loads: list[tuple[str, bool]] = []
        self._hold_loads, self._broken = hold_loads, set(broken)
        self._switches: list[Callable[[], None]] = []
        self.submitted: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.grammars: list[Grammar | None] = []
        self.num_steps = 0
        self.num_cancelled = 0
        self.cached_tokens = 0
        self._script, self._max_rows, self._max_queue = script, max_rows, max_queue
        self._rows: list[_Row] = []
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._thread = None if manual else threading.Thread(target=self._turn, daemon=True)
        if self._thread:
            self._thread.start()

    def load(self, name: str, on_progress: object = None, fetch: bool = True) -> Future[ModelInfo]:
        loaded: Future[ModelInfo] = Future()

        def switch() -> None:
            self.loading = None
            self.model = None if name in self._broken else replace(self._info, name=name)
            if self.model:
                loaded.set_result(self.model)
            else:
                loaded.set_exception(UnsupportedModel(f"mlx-lm cannot load {name}"))

        with self._changed:
            self.loads.append((name, fetch))
            self.loading = Loading(name)
            self._switches.append(switch)
            self._changed.notify_all()
            if not self._hold_loads:
                self.finish_loads()
        return loaded

    def unload(self) -> Future[None]:
        done: Future[None] = Future()

        def switch() -> None:
            self.model = None
            done.set_result(None)

        with self._changed:
            self._switches.append(switch)
            self.finish_loads()
        return done

    def finish_loads(self) -> None:
        """Let the loads that were asked for happen, as soon as no reply runs."""
        with self._changed:
            while self._switches and not self._rows:
                self._switches.pop(0)()

    def submit(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, sink: Sink, grammar: Grammar | None = None
    ) -> ScriptedHandle:
        with self._changed:
            info = self._info
            if not prompt_ids or not (min(prompt_ids) >= 0 and max(prompt_ids) < info.vocab_size):
                raise BadParameter("the prompt is empty or holds a token id outside the vocabulary", param="prompt")
            if any(token_id >= info.vocab_size for token_id, _ in sampling.logit_bias):
                raise BadParameter("logit_bias names a token outside the vocabulary", param="logit_bias")
            if len(prompt_ids) > info.max_prompt:
                numbers = f"{info.max_prompt + 1} tokens, reply included; your request has {len(prompt_ids)}"
                raise PromptTooLong(f"this model's maximum context length is {numbers}; raise --ctx")
            self.require_room(1)
            number = len(self.submitted)
            self.submitted.append((tuple(prompt_ids), sampling))
            self.grammars.append(grammar)
            row = _Row(number, tuple(prompt_ids), sampling, sink, list(self._script(prompt_ids, sampling)))
            self._rows.append(row)
            self._changed.notify_all()
        return ScriptedHandle(number, lambda: self._cancel(row))

    def require_room(self, count: int) -> None:
        with self._changed:
            require_room(count, len(self._rows), self._max_rows + self._max_queue)

    def stats(self) -> EngineStats:
        with self._changed:
            rows = tuple(
                RowStats(r.request_id, "decode", len(r.prompt_ids), len(r.prompt_ids), r.num_completion, 0, 1, 0.0)
                for r in self._rows
            )
            running = min(len(rows), self._max_rows)
            waiting = len(rows) - running
            return EngineStats(
                "scripted",
                rows,
                running,
                waiting,
                64,
                running,
                0,
                0,
                64 - running,
                self.num_steps,
                0,
                0,
                0,
                0,
                0,
                0,
                0.0,
            )

    def close(self, drain_s: float = 0.0) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join(10)

    def step(self) -> None:
        """Every running row says its next delta; a cancelled one says that and is gone."""
        with self._changed:
            self.num_steps += 1
            for row in self._rows[: self._max_rows] + [row for row in self._rows[self._max_rows :] if row.cancelled]:
                delta = Delta(finish=FinishReason.CANCELLED) if row.cancelled else row.deltas.pop(0)
                row.num_completion += len(delta.token_ids)
                if delta.finish:
                    self._rows.remove(row)
                    usage = Usage(len(row.prompt_ids), row.num_completion, self.cached_tokens)
                    delta = replace(delta, usage=usage, timing=Timing(0.0, 0.25, 1.25))
                row.sink(delta)
            if not self._hold_loads:
                self.finish_loads()
            self._changed.notify_all()

    def wait_until(self, holds: Callable[[EngineStats], bool], timeout_s: float = 20.0) -> None:
        """Block until the stats satisfy `holds`; fails the test after `timeout_s`."""
        with self._changed:
            assert self._changed.wait_for(lambda: holds(self.stats()), timeout_s), self.stats()

    def _cancel(self, row: _Row) -> None:
        with self._changed:
            self.num_cancelled += not row.cancelled
            row.cancelled = True
            self._changed.notify_all()

    def _turn(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._closed)
                if self._closed:
                    return
            self.step()
