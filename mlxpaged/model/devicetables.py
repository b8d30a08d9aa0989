"""The block tables of a decode step, kept on the device from one step to the next: a row takes a block every 16 tokens,
so that little of a table changes. Owns those of the last step; knows neither rows nor graphs.

On CUDA every 4 KiB that the host writes cost the first kernel that reads them a page fault of some 35 us: the tables of
32 rows took 0.25 ms of each step while they were sent whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np


class DeviceTables:
    """One table for each KV group, int32. None is written in place: a step in flight keeps its own."""

    def __init__(self) -> None:
        self._host: list[np.ndarray] = []
        self._device: list[mx.array] = []

    def changes(self, tables: Sequence[np.ndarray], most: int) -> tuple[list[np.ndarray], list[mx.array]]:
        """By group, what with_changes() makes of the second to get `tables`: int32 [2, most], places in the flattened
        table over what they hold now. The second are the last step's; where more has changed, `tables` as they are."""
        if [table.shape for table in tables] == [table.shape for table in self._host]:
            places = [np.flatnonzero(table != last) for table, last in zip(tables, self._host, strict=True)]
            if max(map(len, places)) <= most:
                changed = [_padded(table, place, most) for table, place in zip(tables, places, strict=True)]
                return changed, self._device
        nothing = [_padded(table, np.zeros(0, np.intp), most) for table in tables]
        return nothing, [mx.array(table) for table in tables]

    def keep(self, host: Sequence[np.ndarray], device: Sequence[mx.array]) -> None:
        """The tables of a step that was built, whose memory stays as it is."""
        self._host, self._device = list(host), list(device)

    def reset(self) -> None:
        """After a failed step: nothing that is held may be evaluated again."""
        self.keep([], [])


def _padded(table: np.ndarray, places: np.ndarray, most: int) -> np.ndarray:
    """What is added says once more what the first place holds."""
    changes = np.empty((2, most), np.int32)
    changes[:, len(places) :] = [[0], [table.flat[0]]]
    changes[:, : len(places)] = places, table.reshape(-1)[places]
    return changes


def with_changes(table: mx.array, places: mx.array, values: mx.array) -> mx.array:
    """The table as it is now, lazily."""
    return mx.put_along_axis(table.reshape(-1), places, values, 0).reshape(table.shape)
