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
from .scoring import Scored

BEST = 1024
"""On a CPU top-k and top-p look at so many best logits first; all are sorted only when their mass is below top_p."""
_HIDDEN = -1e30
"""Finite, so that a masked logit plus noise never becomes NaN."""


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

    `best`: see BEST. None sorts all logits at once: MLX's partition is a sort on a GPU anyway, and to look at the mass
    would be to wait for the device.
    """

    def __init__(self, num_rows: int, vocab_size: int, best: int | None = BEST) -> None:
        self.vocab_size = vocab_size
        self._best = best
        self._num_rows = num_rows
        self._prompt: mx.array | None = None  # bool [R, V]: ids of the prompt
        self._counts: mx.array | None = None  # int32 [R, V]: how often the reply holds an id
        self._epochs = np.full(num_rows, -1, np.int64)

    def __call__(
        self, logits: mx.array, plan: StepPlan, table: RequestTable, allowed: mx.array | None = None
    ) -> Sampled:
        """logits [B, V] in the plan's order. `allowed` bool [B, V] restricts the ids where given."""
        rows = plan.decode_rows
        raw = logits = logits.astype(mx.float32)
        logits = _biased(logits, plan, table)
        penalised = np.flatnonzero(
            (table.repetition[rows] != 1) | (table.presence[rows] != 0) | (table.frequency[rows] != 0)
        )
        if len(penalised):
            self._refresh(rows[penalised], plan.decode_positions[penalised], table)
            logits[mx.array(penalised)] = self._penalise(logits[mx.array(penalised)], rows[penalised], table)
        if allowed is not None:
            logits = mx.where(allowed, logits, _HIDDEN)
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        noisy = np.flatnonzero(table.temperature[rows] > 0)
        if len(noisy) == len(rows):
            tokens = self._sample(logits, rows, plan.decode_positions, table).astype(mx.int32)
        elif len(noisy):
            chosen = self._sample(logits[mx.array(noisy)], rows[noisy], plan.decode_positions[noisy], table)
            tokens[mx.array(noisy)] = chosen.astype(mx.int32)
        if len(penalised):
            assert self._counts is not None
            places = mx.array(rows[penalised])
            self._counts = self._counts.at[places, tokens[mx.array(penalised)]].add(1)
        return _with_logprobs(raw, tokens, np.flatnonzero(table.logprobs[rows] >= 0))

    def state(self) -> list[mx.array]:
        """What a step must evaluate beside its results."""
        return [array for array in (self._prompt, self._counts) if array is not None]

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

    def _sample(self, logits: mx.array, rows: np.ndarray, positions: np.ndarray, table: RequestTable) -> mx.array:
        """ids [S] drawn from logits [S, V] by each row's temperature and filters."""
        scaled = logits / mx.array(table.temperature[rows])[:, None]
        top_k, top_p, min_p = table.top_k[rows], table.top_p[rows], table.min_p[rows]
        if np.any(min_p > 0):
            least = scaled.max(axis=-1, keepdims=True) + mx.array(np.log(np.maximum(min_p, 1e-30)))[:, None]
            scaled = mx.where(scaled >= least, scaled, _HIDDEN)
        cut = np.flatnonzero((top_k > 0) | (top_p < 1))
        if len(cut) == len(rows):
            scaled = _cut(scaled, top_k, top_p, self._best)
        elif len(cut):
            places = mx.array(cut)
            scaled[places] = _cut(scaled[places], top_k[cut], top_p[cut], self._best)
        return mx.argmax(scaled + gumbel(table.seed[rows], table.choice[rows], positions, scaled.shape[-1]), axis=-1)


def _biased(logits: mx.array, plan: StepPlan, table: RequestTable) -> mx.array:
    """Add logit biases, and hide end ids from replies shorter than min_tokens."""
    rows = plan.decode_rows
    short = plan.decode_positions + 1 - table.prompt_len[rows] < table.min_tokens[rows]
    entries: list[int] = []
    ids: list[int] = []
    biases: list[float] = []
    for entry in np.flatnonzero(short | table.biased[rows]).tolist():
        request = table.requests[rows[entry]]
        assert request is not None
        pairs = list(request.sampling.logit_bias)
        if short[entry]:
            pairs += [(token, _HIDDEN) for token in {*request.end_token_ids, *request.sampling.stop_token_ids}]
        entries += [entry] * len(pairs)
        ids += [token for token, _ in pairs]
        biases += [bias for _, bias in pairs]
    if not entries:
        return logits
    return logits.at[mx.array(entries), mx.array(ids)].add(mx.array(biases, mx.float32))


def _cut(scaled: mx.array, top_k: np.ndarray, top_p: np.ndarray, best: int | None) -> mx.array:
    """Hide what top-k, then top-p, exclude from scaled logits [S, V]. `best`: see Sampler."""
    vocab = scaled.shape[-1]
    k = np.where(top_k > 0, np.minimum(top_k, vocab), vocab)
    best = min(vocab, max(best or vocab, int(k[top_k > 0].max(initial=0))))
    least, mass = _least_kept(scaled, best, k, top_p)
    if best < vocab:
        open_ended = (top_k == 0) & (top_p < 1)
        if np.any(open_ended) and bool(mx.any((mass < mx.array(top_p)) & mx.array(open_ended))):
            least, _ = _least_kept(scaled, vocab, k, top_p)
    return mx.where(scaled >= least[:, None], scaled, _HIDDEN)


def _least_kept(scaled: mx.array, best: int, k: np.ndarray, top_p: np.ndarray) -> tuple[mx.array, mx.array]:
    """Of the `best` largest logits of each row: the least that stays, and their share of the row's mass."""
    vocab = scaled.shape[-1]
    largest = scaled if best == vocab else mx.topk(scaled, best, axis=-1)
    largest = mx.sort(largest, axis=-1)[:, ::-1]
    kept = mx.arange(best)[None] < mx.array(k)[:, None]
    everything = mx.logsumexp(scaled, axis=-1, keepdims=True)
    among = mx.logsumexp(mx.where(kept, largest, _HIDDEN), axis=-1, keepdims=True)
    total = mx.where(mx.array(k < vocab)[:, None], among, everything)
    share = mx.where(kept, mx.exp(largest - total), 0)
    before = mx.cumsum(share, axis=-1) - share
    kept = kept & ((before < mx.array(top_p)[:, None]) | (mx.arange(best)[None] == 0))
    return mx.where(kept, largest, mx.inf).min(axis=-1), share.sum(axis=-1)


def gumbel(seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray, vocab: int) -> mx.array:
    """Gumbel noise [S, V], row s a function of (seeds[s], choices[s], positions[s]) alone."""
    keys = _mixed(
        _mixed(seeds.astype(np.uint64))
        ^ _mixed(choices.astype(np.uint64) << np.uint64(32) | positions.astype(np.uint64))
    )
    high, low = ((keys >> np.uint64(shift)).astype(np.uint32)[:, None] for shift in (32, 0))
    bits = _mixed_bits(_mixed_bits(mx.arange(vocab, dtype=mx.uint32)[None] ^ mx.array(high)) + mx.array(low))
    # Exponential before it is Gumbel: a float resolves the small values, which become the large noise, best near 0.
    uniform = mx.minimum((bits.astype(mx.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -mx.log(-mx.log1p(-uniform))


def _mixed_bits(values: mx.array) -> mx.array:
    """A 32-bit finaliser, by Chris Wellons' search for low bias: an id's noise costs a few operations on the id, where
    MLX's own generator takes longer on a GPU than the model's head."""
    values = (values ^ (values >> 16)) * mx.array(0x7FEB352D, mx.uint32)
    values = (values ^ (values >> 15)) * mx.array(0x846CA68B, mx.uint32)
    return values ^ (values >> 16)


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        values = (values + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _with_logprobs(raw: mx.array, tokens: mx.array, asked: np.ndarray) -> Sampled:
    if not len(asked):
        return Sampled(tokens, asked)
    places = mx.array(asked)
    return Sampled(tokens, asked, Scored.of(raw[places], tokens[places], MAX_TOP_LOGPROBS))
