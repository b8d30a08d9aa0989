"""Log-probabilities under the raw distribution: of ids that were chosen, and the best alternatives. Owns the gathering
of a step's prompt positions whose logits are wanted; samples nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..sched.requests import StepPlan, TokenLogprob
from ..sched.table import RequestTable

FLOOR_LOGPROB = -9999.0


@dataclass(frozen=True)
class Scored:
    """Lazy logprobs of `ids` int32 [S], one id for each row of logits: `chosen` [S], and the `count` best alternatives
    `best_ids`, `best` [S, count], best first (None where nobody wants any)."""

    ids: mx.array
    chosen: mx.array
    best_ids: mx.array | None = None
    best: mx.array | None = None

    @classmethod
    def of(cls, logits: mx.array, ids: mx.array, count: int) -> Scored:
        """logits float32 [S, V], ids int32 [S]. Only what is named above leaves the device."""
        total = mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = (mx.take_along_axis(logits, ids[:, None], axis=-1) - total)[:, 0]
        count = min(count, logits.shape[-1])
        if not count:
            return cls(ids, chosen)
        found = mx.argpartition(-logits, count - 1, axis=-1)[:, :count]
        values = mx.take_along_axis(logits, found, axis=-1) - total
        order = mx.argsort(-values, axis=-1)
        return cls(ids, chosen, mx.take_along_axis(found, order, axis=-1), mx.take_along_axis(values, order, axis=-1))

    def arrays(self) -> list[mx.array]:
        return [array for array in (self.chosen, self.best_ids, self.best) if array is not None]

    def result(self, top: np.ndarray) -> list[TokenLogprob]:
        """On the host; waits. `top` int [S]: how many alternatives each row wants."""
        ids, chosen = np.array(self.ids).tolist(), np.array(self.chosen).tolist()
        if self.best_ids is None:
            return [TokenLogprob(token, _floored(value)) for token, value in zip(ids, chosen, strict=True)]
        best_ids, best = np.array(self.best_ids), np.array(self.best)
        entries = []
        for row, (token, value) in enumerate(zip(ids, chosen, strict=True)):
            pairs = zip(best_ids[row, : top[row]].tolist(), best[row, : top[row]].tolist(), strict=True)
            alternatives = tuple((other, _floored(logprob)) for other, logprob in pairs)
            entries.append(TokenLogprob(token, _floored(value), alternatives))
        return entries


def _floored(logprob: float) -> float:
    """A number that JSON has, also for -inf and NaN (which no comparison prefers)."""
    return max(FLOOR_LOGPROB, logprob)


@dataclass(frozen=True)
class PromptScores:
    """The logprobs of a step's chunks that asked for them. `entries` int32 [S]: where their tokens lie in the step;
    `top` int [S] and `lengths`: alternatives a token, tokens a chunk."""

    entries: np.ndarray
    next_ids: np.ndarray
    top: np.ndarray
    lengths: tuple[int, ...]
    scored: Scored | None = None

    @classmethod
    def wanted(cls, plan: StepPlan, table: RequestTable) -> PromptScores | None:
        """What `plan` asks for, None when nothing. The table is read here and not later."""
        entry = len(plan.decode_rows)
        entries, ids, top, lengths = [], [], [], []
        for chunk in plan.chunks:
            if chunk.logprobs is not None:
                entries.append(np.arange(entry, entry + chunk.length, dtype=np.int32))
                ids.append(table.token_ids[chunk.row, chunk.start + 1 : chunk.start + chunk.length + 1].copy())
                top.append(np.full(chunk.length, chunk.logprobs, np.int32))
                lengths.append(chunk.length)
            entry += chunk.length
        if not lengths:
            return None
        return cls(np.concatenate(entries), np.concatenate(ids), np.concatenate(top), tuple(lengths))

    def of(self, logits: mx.array) -> PromptScores:
        """With the logits [S, V] of the wanted tokens."""
        scored = Scored.of(logits.astype(mx.float32), mx.array(self.next_ids), int(self.top.max()))
        return PromptScores(self.entries, self.next_ids, self.top, self.lengths, scored)

    def arrays(self) -> list[mx.array]:
        return self.scored.arrays() if self.scored else []

    def result(self) -> tuple[tuple[TokenLogprob, ...], ...]:
        """One tuple a chunk; waits."""
        assert self.scored is not None
        return tuple(split(self.scored.result(self.top), self.lengths))


def split(entries: Sequence[TokenLogprob], lengths: Sequence[int]) -> list[tuple[TokenLogprob, ...]]:
    """`entries` cut into runs of `lengths`."""
    ends = np.cumsum(lengths).tolist()
    return [tuple(entries[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
