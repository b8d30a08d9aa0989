"""From logits to drawn ids: temperature, min-p, top-k, top-p, then the argmax of logits + Gumbel noise over what stays.
Owns a GPU's two ways of drawing; hostdrawing.py has a CPU's. Knows nothing of rows, steps or penalties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from ..kernels.draw import OFF, draw, packed_wishes
from ..kernels.launch import Launcher
from ..kernels.noise import MIXERS, mixed_bits
from ..sched.table import RequestTable

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


Draw = Callable[[mx.array, Wishes], mx.array]
"""ids int32 [S] from logits float32 [S, V]: one a row."""


class KernelDraw:
    """By our own kernels, which sort nothing."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch

    def __call__(self, logits: mx.array, wishes: Wishes) -> mx.array:
        """See Draw. Lazy."""
        return draw(self._launch, logits, mx.array(_sent(wishes, logits.shape[-1])))


class PlainDraw:
    """Where those do not serve. All logits are sorted, in compiled graphs: MLX's partition is a sort on a GPU, a look
    at the mass of the best would wait for the device, and each of some 40 small operations costs the host a start."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[bool, bool], Callable[..., mx.array]] = {}

    def __call__(self, logits: mx.array, wishes: Wishes) -> mx.array:
        """See Draw. Lazy."""
        cut = (wishes.top_k > 0) | (wishes.top_p < 1)
        uses = (bool(np.any(wishes.min_p > 0)), bool(np.any(cut)))
        if uses not in self._graphs:
            self._graphs[uses] = mx.compile(partial(_drawn, *uses))
        return self._graphs[uses](logits, mx.array(_sent(wishes, logits.shape[-1])))


def _sent(wishes: Wishes, vocab_size: int) -> np.ndarray:
    """What the device needs of them in one piece, for compiled.py's reason: packed_wishes(), as if every row had wished
    everything."""
    least = np.where(wishes.min_p > 0, log_least(wishes.min_p), HIDDEN)
    p = np.where(wishes.top_p < 1, wishes.top_p, OFF)
    k = np.where(wishes.top_k > 0, np.minimum(wishes.top_k, vocab_size), vocab_size)
    return packed_wishes(wishes.temperature, least, p, k, wishes.noise)


def _received(sent: mx.array) -> tuple[mx.array, ...]:
    """Temperature and log_least() [S, 1], k and p [S], then noise_keys' columns [S, 1]."""
    temperature, least, p, k, high, low = mx.contiguous(sent.T)[:6]
    temperature, least, p = (column.view(mx.float32) for column in (temperature, least, p))
    return temperature[:, None], least[:, None], k.view(mx.int32), p, high[:, None], low[:, None]


def _drawn(min_p: bool, cut: bool, logits: mx.array, sent: mx.array) -> mx.array:
    """The whole way, over all logits of all rows."""
    temperature, least, k, p, high, low = _received(sent)
    scaled = logits / temperature
    if min_p:
        scaled = mx.where(scaled >= scaled.max(axis=-1, keepdims=True) + least, scaled, HIDDEN)
    if cut:
        scaled = mx.where(scaled >= _least_kept(scaled, k, p), scaled, HIDDEN)
    noisy = scaled + gumbel(high, low, scaled.shape[-1])
    # Where the forward overflowed, an id without a number is at least one that no mask hides.
    return mx.argmax(mx.where(mx.isnan(logits), mx.inf, noisy), axis=-1).astype(mx.int32)


def _least_kept(scaled: mx.array, k: mx.array, p: mx.array) -> mx.array:
    """The least logit of each row [S, 1] that top-k, then top-p, let stay."""
    largest = mx.sort(scaled, axis=-1)[:, ::-1]
    place = mx.arange(scaled.shape[-1])[None]
    kept = place < k[:, None]
    total = mx.logsumexp(mx.where(kept, largest, HIDDEN), axis=-1, keepdims=True)
    share = mx.where(kept, mx.exp(largest - total), 0)
    before = mx.cumsum(share, axis=-1) - share
    kept = kept & ((before < p[:, None]) | (place == 0))
    return mx.where(kept, largest, mx.inf).min(axis=-1, keepdims=True)


def log_least(min_p: np.ndarray) -> np.ndarray:
    """How far below the best logit min-p lets one be, float32; nothing is far enough where it is off."""
    return np.log(np.maximum(min_p, 1e-30)).astype(np.float32)


def noise_keys(seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint32 [S, 2], row s a function of (seeds[s], choices[s], positions[s]) alone."""
    keys = _mixed(
        _mixed(seeds.astype(np.uint64))
        ^ _mixed(choices.astype(np.uint64) << np.uint64(32) | positions.astype(np.uint64))
    )
    return np.stack([keys >> np.uint64(32), keys & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)


def gumbel(high: mx.array, low: mx.array, vocab: int) -> mx.array:
    """Gumbel noise [S, V] from noise_keys' columns, each uint32 [S, 1]: a hash of key and id. Elementwise, so that a
    compiled graph makes one kernel of it; MLX's own generator takes 0.4 ms for 32 rows of 128256 ids on an H200."""
    factors = [mx.array(factor, mx.uint32) for factor in MIXERS]
    bits = mixed_bits(mixed_bits(mx.arange(vocab, dtype=mx.uint32)[None] ^ high, factors) + low, factors)
    uniform = mx.minimum((bits.astype(mx.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -mx.log(-mx.log1p(-uniform))


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        values = (values + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
