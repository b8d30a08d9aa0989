"""From logits to ids, for every row of a step in one go. Owns the order of effects and the device-side counts behind
the penalties; knows nothing of requests' ends, text or blocks.

Order: logit bias, penalties, allowed ids, temperature, min-p, top-k, top-p, then the argmax of logits + Gumbel noise
over the whole vocabulary. The noise of a token is a function of (seed, choice, position), so neighbours in the batch
never change a reply. A row without an effect pays nothing for its neighbours' effects.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..sched.requests import MAX_TOP_LOGPROBS, StepPlan, StepResult, TokenLogprob
from ..sched.table import RequestTable
from .drawing import HIDDEN, Draw, Wishes
from .hostdrawing import host_draw
from .scoring import Scored


@dataclass(frozen=True)
class Sampled:
    """Lazy results of one step: `tokens` int32 [B]; the logprobs of the entries in `asked`."""

    tokens: mx.array
    asked: np.ndarray
    scored: Scored | None = None

    def arrays(self) -> list[mx.array]:
        return [self.tokens, *(self.scored.arrays() if self.scored else [])]

    def result(self, top: np.ndarray) -> StepResult:
        """On the host; waits. `top` int32 [len(asked)]: how many alternatives each asked for."""
        tokens = np.array(self.tokens, copy=False).astype(np.int32)
        if self.scored is None:
            return StepResult(tokens)
        logprobs: list[TokenLogprob | None] = [None] * len(tokens)
        for entry, logprob in zip(self.asked.tolist(), self.scored.result(top), strict=True):
            logprobs[entry] = logprob
        return StepResult(tokens, logprobs)


class Sampler:
    """Samples a step's decode entries and keeps the counts that penalties need, one row of counts per table row.
    `draw`: a GPU's way of drawing, or a CPU's."""

    def __init__(self, num_rows: int, vocab_size: int, draw: Draw = host_draw) -> None:
        self.vocab_size = vocab_size
        self._draw = draw
        self._num_rows = num_rows
        self._prompt: mx.array | None = None  # bool [R, V]: ids of the prompt
        self._counts: mx.array | None = None  # int32 [R, V]: how often the reply holds an id
        self._epochs = np.full(num_rows, -1, np.int64)

    def __call__(
        self, logits: mx.array, plan: StepPlan, table: RequestTable, allowed: mx.array | None = None
    ) -> Sampled:
        """logits [B, V] in the plan's order. `allowed` bool [B, V] restricts the ids where given."""
        rows = plan.decode_rows
        raw = logits.astype(mx.float32)
        logits = _biased(mx.array(raw), plan, table)  # an array of its own: rows of it are assigned to
        penalised = np.flatnonzero(
            (table.repetition[rows] != 1) | (table.presence[rows] != 0) | (table.frequency[rows] != 0)
        )
        if len(penalised):
            self._refresh(rows[penalised], plan.decode_positions[penalised], table)
            logits[mx.array(penalised)] = self._penalise(logits[mx.array(penalised)], rows[penalised], table)
        if allowed is not None:
            logits = mx.where(allowed, logits, HIDDEN)
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        noisy = np.flatnonzero(table.temperature[rows] > 0)
        if len(noisy) == len(rows):
            tokens = self._draw(logits, Wishes.of(table, rows, plan.decode_positions))
        elif len(noisy):
            wishes = Wishes.of(table, rows[noisy], plan.decode_positions[noisy])
            chosen = self._draw(logits[mx.array(noisy)], wishes)
            tokens[mx.array(noisy)] = chosen
        if len(penalised):
            assert self._counts is not None
            places = mx.array(rows[penalised])
            self._counts = self._counts.at[places, tokens[mx.array(penalised)]].add(1)
        return _with_logprobs(raw, tokens, np.flatnonzero(table.logprobs[rows] >= 0))

    def state(self) -> list[mx.array]:
        """What a step must evaluate beside its results."""
        return [array for array in (self._prompt, self._counts) if array is not None]

    def reset(self) -> None:
        """After a failed step: the counts hang on it. They are counted anew, from the table."""
        self._prompt = self._counts = None
        self._epochs[:] = -1

    def _refresh(self, rows: np.ndarray, positions: np.ndarray, table: RequestTable) -> None:
        """Count from the table for rows new to the sampler: all their ids are known to the host then."""
        if self._counts is None:
            self._prompt = mx.zeros((self._num_rows, self.vocab_size), mx.bool_)
            self._counts = mx.zeros((self._num_rows, self.vocab_size), mx.int32)
        assert self._prompt is not None
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            if self._epochs[row] == table.epoch[row]:
                continue
            self._epochs[row] = table.epoch[row]
            ids, prompt_len = table.token_ids[row, : position + 1], int(table.prompt_len[row])
            seen = np.zeros(self.vocab_size, bool)
            seen[ids[:prompt_len]] = True
            self._prompt[row] = mx.array(seen)
            self._counts[row] = mx.array(np.bincount(ids[prompt_len:], minlength=self.vocab_size).astype(np.int32))

    def _penalise(self, logits: mx.array, rows: np.ndarray, table: RequestTable) -> mx.array:
        """Repetition counts prompt and reply (CTRL's rule), presence and frequency the reply only (OpenAI's)."""
        assert self._prompt is not None and self._counts is not None
        places = mx.array(rows)
        counts = self._counts[places]
        repetition, presence, frequency = (
            mx.array(column[rows])[:, None] for column in (table.repetition, table.presence, table.frequency)
        )
        repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
        logits = mx.where(self._prompt[places] | (counts > 0), repeated, logits)
        return logits - frequency * counts - presence * (counts > 0)


def _biased(logits: mx.array, plan: StepPlan, table: RequestTable) -> mx.array:
    """Add logit biases, and hide end ids from replies shorter than min_tokens. A tokenizer may know end ids for which
    the model has no logit."""
    rows, vocab_size = plan.decode_rows, logits.shape[-1]
    short = plan.decode_positions + 1 - table.prompt_len[rows] < table.min_tokens[rows]
    entries: list[int] = []
    ids: list[int] = []
    biases: list[float] = []
    for entry in np.flatnonzero(short | table.biased[rows]).tolist():
        request = table.requests[rows[entry]]
        assert request is not None
        pairs = list(request.sampling.logit_bias)
        if short[entry]:
            pairs += [(token, HIDDEN) for token in {*request.end_token_ids, *request.sampling.stop_token_ids}]
        pairs = [(token, bias) for token, bias in pairs if token < vocab_size]
        entries += [entry] * len(pairs)
        ids += [token for token, _ in pairs]
        biases += [bias for _, bias in pairs]
    if not entries:
        return logits
    return logits.at[mx.array(entries), mx.array(ids)].add(mx.array(biases, mx.float32))


def _with_logprobs(raw: mx.array, tokens: mx.array, asked: np.ndarray) -> Sampled:
    if not len(asked):
        return Sampled(tokens, asked)
    places = mx.array(asked)
    return Sampled(tokens, asked, Scored.of(raw[places], tokens[places], MAX_TOP_LOGPROBS))
