"""The last id of every row, kept on the device: what one step samples is the next one's input before the host has seen
it. Owns that array; knows nothing of requests or ends."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


class LastTokens:
    """One id per row of the state table. Steps mostly repeat the last one's rows: then its ids are handed on as they
    are, and the array of all rows is brought up to date only when others are asked for."""

    def __init__(self, num_rows: int) -> None:
        self._ids = mx.zeros((num_rows,), mx.int32)
        self._rows = np.zeros(0, np.int32)  # whose newest ids are in _newest, not yet in _ids
        self._newest = mx.zeros((0,), mx.int32)

    def put(self, rows: np.ndarray, ids: mx.array) -> None:
        """`ids` int32 [B] are the newest of `rows` (distinct), lazily."""
        if not np.array_equal(rows, self._rows):
            self._flush()
        self._rows, self._newest = rows, ids

    def take(self, rows: np.ndarray) -> mx.array:
        """The newest ids of `rows`, lazily: int32 [B]."""
        if np.array_equal(rows, self._rows):
            return self._newest
        self._flush()
        return self._ids[mx.array(rows)]

    def _flush(self) -> None:
        if len(self._rows):
            self._ids[mx.array(self._rows)] = self._newest
            self._rows = self._rows[:0]

    def state(self) -> list[mx.array]:
        """What a step must evaluate, so that no chain of lazy updates grows."""
        return [self._ids, self._newest]

    def reset(self) -> None:
        """After a failed step: nothing that is held may be evaluated again."""
        self._ids, self._rows = mx.zeros_like(self._ids), self._rows[:0]
        self._newest = mx.zeros((0,), mx.int32)
