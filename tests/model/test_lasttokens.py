"""The ids that only the device knows: each row's newest, however steps' rows change."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.model.lasttokens import LastTokens


@pytest.mark.parametrize("seed", range(4))
def test_every_row_has_the_id_that_was_put_last(seed: int) -> None:
    rng = np.random.default_rng(seed)
    last, expected = LastTokens(6), np.zeros(6, np.int32)
    rows = np.arange(3, dtype=np.int32)
    for step in range(60):
        if rng.random() < 0.4:  # else the step repeats the rows before, as steps do
            rows = rng.permutation(6)[: rng.integers(1, 7)].astype(np.int32)
        ids = rng.integers(0, 1000, len(rows)).astype(np.int32)
        last.put(rows, mx.array(ids))
        expected[rows] = ids
        asked = rows if rng.random() < 0.5 else rng.permutation(6)[: rng.integers(1, 7)].astype(np.int32)
        assert np.array(last.take(asked)).tolist() == expected[asked].tolist(), f"step {step}"
        mx.eval(last.state())


def test_repeated_rows_hand_on_the_very_array() -> None:
    last, rows, ids = LastTokens(4), np.array([2, 0], np.int32), mx.array([7, 9])
    last.put(rows, ids)
    assert last.take(np.array([2, 0], np.int32)) is ids
    assert np.array(last.take(np.array([0, 2], np.int32))).tolist() == [9, 7]


def test_after_a_reset_nothing_of_before_is_evaluated() -> None:
    last = LastTokens(2)
    last.put(np.array([1], np.int32), mx.array([5]))
    last.reset()
    assert np.array(last.take(np.array([0, 1], np.int32))).tolist() == [0, 0]
