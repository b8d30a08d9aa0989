"""From logits to drawn ids: temperature, min-p, top-k, top-p, then the argmax of logits + Gumbel noise over the whole
vocabulary. Owns the noise and the two ways of finding what stays; knows nothing of rows, steps or penalties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from ..sched.table import RequestTable

BEST = 1024
"""On a CPU top-k and top-p look at so many best logits first; all are sorted only when their mass is below top_p."""

HIDDEN = -1e30
"""Finite, so that a masked logit plus noise never becomes NaN."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """How each of S rows wants to be drawn; what is off is neutral. `noise` uint32 [S, 2] is a function of the row's
    (seed, choice, position) alone, so neighbours never change a reply."""

    temperature: np.ndarray
    min_p: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    noise: np.ndarray

    @classmethod
    def of(cls, table: RequestTable, rows: np.ndarray, positions: np.ndarray) -> Wishes:
        noise = noise_keys(table.seed[rows], table.choice[rows], positions)
        return cls(table.temperature[rows], table.min_p[rows], table.top_k[rows], table.top_p[rows], noise)


class Draw:
    """Draws one id a row. `best`: see BEST. None sorts all logits at once and runs as compiled graphs: for a GPU, where
    MLX's partition is a sort anyway, a look at the mass would wait for the device, and each of some 40 small operations
    costs the host a start."""

    def __init__(self, best: int | None = BEST) -> None:
        self._best = best
        self._graphs: dict[tuple[bool, bool], Callable[..., mx.array]] = {}

    def __call__(self, logits: mx.array, wishes: Wishes) -> mx.array:
        """ids [S] from logits [S, V]."""
        vocab = logits.shape[-1]
        cut = (wishes.top_k > 0) | (wishes.top_p < 1)
        k = np.where(wishes.top_k > 0, np.minimum(wishes.top_k, vocab), vocab).astype(np.int32)
        p = np.where(wishes.top_p < 1, wishes.top_p, 2).astype(np.float32)  # 2: no sum of shares reaches it
        uses = (bool(np.any(wishes.min_p > 0)), bool(np.any(cut)))
        sent = mx.array(_sent(wishes, k, p))
        if self._best is None:
            if uses not in self._graphs:
                self._graphs[uses] = mx.compile(partial(_drawn, *uses))
            return self._graphs[uses](logits, sent)
        temperature, log_least, _, _, high, low = _received(sent)
        found = _scaled(uses[0], logits, temperature, log_least)
        if uses[1]:
            places = mx.array(np.flatnonzero(cut))
            found[places] = _cut(found[places], k[cut], p[cut], self._best)
        return mx.argmax(found + gumbel(high, low, vocab), axis=-1)


def _sent(wishes: Wishes, k: np.ndarray, p: np.ndarray) -> np.ndarray:
    """What the device needs of them in one piece, for compiled.py's reason: uint32 [6, S], the bits of each."""
    floats = np.stack([wishes.temperature, _log_least(wishes.min_p), p]).astype(np.float32)
    return np.concatenate([floats.view(np.uint32), k.view(np.uint32)[None], wishes.noise.T])


def _received(sent: mx.array) -> tuple[mx.array, ...]:
    """Temperature and log_least [S, 1], k and p [S], then noise_keys' columns [S, 1]."""
    temperature, log_least, p = (column.view(mx.float32) for column in sent[:3])
    return temperature[:, None], log_least[:, None], sent[3].view(mx.int32), p, sent[4][:, None], sent[5][:, None]


def _drawn(min_p: bool, cut: bool, logits: mx.array, sent: mx.array) -> mx.array:
    """The whole way, over all logits of all rows."""
    temperature, log_least, k, p, high, low = _received(sent)
    scaled = _scaled(min_p, logits, temperature, log_least)
    if cut:
        least, _ = _least_kept(scaled, scaled.shape[-1], k, p)
        scaled = mx.where(scaled >= least[:, None], scaled, HIDDEN)
    return mx.argmax(scaled + gumbel(high, low, scaled.shape[-1]), axis=-1)


def _scaled(min_p: bool, logits: mx.array, temperature: mx.array, log_least: mx.array) -> mx.array:
    scaled = logits / temperature
    if not min_p:
        return scaled
    return mx.where(scaled >= scaled.max(axis=-1, keepdims=True) + log_least, scaled, HIDDEN)


def _log_least(min_p: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(min_p, 1e-30)).astype(np.float32)


def _cut(scaled: mx.array, k: np.ndarray, p: np.ndarray, best: int) -> mx.array:
    """Hide what top-k, then top-p, exclude from scaled logits [S, V], by a look at the `best` of them."""
    vocab = scaled.shape[-1]
    best = min(vocab, max(best, int(k[k < vocab].max(initial=0))))
    keeps = mx.array(k), mx.array(p)
    least, mass = _least_kept(scaled, best, *keeps)
    open_ended = k == vocab
    if best < vocab and np.any(open_ended) and bool(mx.any((mass < keeps[1]) & mx.array(open_ended))):
        least, _ = _least_kept(scaled, vocab, *keeps)
    return mx.where(scaled >= least[:, None], scaled, HIDDEN)


def _least_kept(scaled: mx.array, best: int, k: mx.array, p: mx.array) -> tuple[mx.array, mx.array]:
    """Of the `best` largest logits of each row: the least that stays, and their share of the row's mass."""
    vocab = scaled.shape[-1]
    largest = scaled if best == vocab else mx.topk(scaled, best, axis=-1)
    largest = mx.sort(largest, axis=-1)[:, ::-1]
    place = mx.arange(best)[None]
    kept = place < k[:, None]
    everything = mx.logsumexp(scaled, axis=-1, keepdims=True)
    among = mx.logsumexp(mx.where(kept, largest, HIDDEN), axis=-1, keepdims=True)
    total = mx.where((k < vocab)[:, None], among, everything)
    share = mx.where(kept, mx.exp(largest - total), 0)
    before = mx.cumsum(share, axis=-1) - share
    kept = kept & ((before < p[:, None]) | (place == 0))
    return mx.where(kept, largest, mx.inf).min(axis=-1), share.sum(axis=-1)


def noise_keys(seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint32 [S, 2], row s a function of (seeds[s], choices[s], positions[s]) alone."""
    keys = _mixed(
        _mixed(seeds.astype(np.uint64))
        ^ _mixed(choices.astype(np.uint64) << np.uint64(32) | positions.astype(np.uint64))
    )
    return np.stack([keys >> np.uint64(32), keys & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)


def gumbel(high: mx.array, low: mx.array, vocab: int) -> mx.array:
    """Gumbel noise [S, V] from noise_keys' columns, each uint32 [S, 1]: a hash of key and id."""
    bits = _mixed_bits(_mixed_bits(mx.arange(vocab, dtype=mx.uint32)[None] ^ high) + low)
    # Exponential before it is Gumbel: a float resolves the small values, which become the large noise, best near 0.
    uniform = mx.minimum((bits.astype(mx.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -mx.log(-mx.log1p(-uniform))


def _mixed_bits(values: mx.array) -> mx.array:
    """A 32-bit finaliser, by Chris Wellons' search for low bias. Elementwise, so that a compiled graph makes one kernel
    of all the noise; MLX's own generator takes 0.4 ms for 32 rows of 128256 ids on an H200."""
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
