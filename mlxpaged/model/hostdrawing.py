"""drawing.py's work on a CPU, in numpy, a row at a time: MLX's exponentials and logarithms take some 20 ns an element
there, numpy's one, and a row's noise is only needed for the few ids that its filters let stay."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..kernels.noise import host_gumbel
from .drawing import Wishes, log_least

BEST = 1024
"""Top-p looks at so many best logits first; all are sorted only when those hold less than top_p."""


def host_draw(logits: mx.array, wishes: Wishes) -> mx.array:
    """See drawing.Draw. Waits for the logits."""
    rows = np.array(logits, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):  # a masked logit by a small temperature; overflowed ones
        return mx.array([_drawn(row, wishes, index) for index, row in enumerate(rows)], mx.int32)


def _drawn(logits: np.ndarray, wishes: Wishes, index: int) -> int:
    """One id from logits [V], by the wishes of row `index`."""
    scaled, ids = logits / wishes.temperature[index], None
    highest = scaled.max()
    if np.isnan(highest):  # the forward overflowed; an id without a number is at least one that a grammar allows
        return int(np.argmax(scaled))
    if wishes.min_p[index] > 0:
        ids = np.flatnonzero(scaled >= highest + log_least(wishes.min_p[index]))
        scaled = scaled[ids]
    top_k, top_p = int(wishes.top_k[index]), float(wishes.top_p[index])
    if 0 < top_k < len(scaled) or top_p < 1:
        stay = np.flatnonzero(scaled >= _least_kept(scaled, top_k, top_p))
        scaled, ids = scaled[stay], stay if ids is None else ids[stay]
    if ids is None:
        ids = np.arange(len(scaled))
    return int(ids[np.argmax(scaled + host_gumbel(wishes.noise[index], ids))])


def _least_kept(scaled: np.ndarray, top_k: int, top_p: float) -> float:
    """The least of the logits that top-k, then top-p, let stay."""
    if 0 < top_k < len(scaled):
        largest = _largest(scaled, top_k)
        return _least_reaching(largest, _log_sum(largest), top_p) if top_p < 1 else float(largest[-1])
    total, largest = _log_sum(scaled), _largest(scaled, min(BEST, len(scaled)))
    if np.exp(largest - total).sum() < top_p:
        largest = _largest(scaled, len(scaled))
    return _least_reaching(largest, total, top_p)


def _largest(scaled: np.ndarray, count: int) -> np.ndarray:
    """Best first."""
    return np.sort(np.partition(scaled, len(scaled) - count)[-count:])[::-1]


def _log_sum(scaled: np.ndarray) -> np.float32:
    highest = scaled.max()
    return highest + np.log(np.exp(scaled - highest).sum())


def _least_reaching(largest: np.ndarray, total: np.float32, top_p: float) -> float:
    """The last of `largest`, best first, before which the shares of a mass of log `total` do not reach top_p."""
    share = np.exp(largest - total)
    kept = np.cumsum(share) - share < top_p
    kept[0] = True
    return float(largest[kept].min())
