"""Into how many partitions rows are divided: enough to fill a device, none without need."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.kernels.launch import new_token, padded
from mlxpaged.kernels.paged_decode import paged_decode
from mlxpaged.kernels.partitions import MOST_TOKENS, num_partitions


@pytest.mark.parametrize(
    ("rows", "heads", "seen", "expected"),
    [
        (1, 8, 0, 1),
        (1, 8, 511, 1),  # the merge costs as much as two halves would save
        (1, 8, 512, 4),
        (1, 8, 1024, 8),
        (1, 8, 8192, 32),
        (1, 8, 32768, 32),  # the device is full
        (1, 8, 65536, 64),
        (1, 1, 65536, 256),
        (8, 8, 2048, 8),
        (32, 8, 2048, 2),
        (32, 8, 2049, 3),
        (256, 32, 1024, 1),
        (256, 1024, 4096, 4),
    ],
)
def test_few_rows_are_divided_until_the_device_is_full(rows: int, heads: int, seen: int, expected: int) -> None:
    assert num_partitions(rows, heads, seen) == expected


def test_no_partition_is_longer_than_the_most_tokens() -> None:
    for rows in (1, 3, 40):
        for seen in range(1, 9000, 61):
            assert num_partitions(rows, 8, seen) * MOST_TOKENS >= seen


@pytest.mark.parametrize(("window", "positions", "expected"), [(None, 1, 32), (1024, 1, 8), (1023, 2, 8), (400, 16, 1)])
def test_only_what_the_window_shows_is_divided(window: int | None, positions: int, expected: int) -> None:
    grids: list[tuple[int, int, int]] = []

    def launch(spec, inputs, *, grid, shapes, dtypes, **_) -> list[mx.array]:
        grids.append(grid)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    pool, tables, lengths = mx.zeros((4, 16, 8, 64)), padded(np.zeros((1, 1024))), padded(np.array([16384]))
    queries, token = mx.zeros((1, positions, 8, 64)), new_token()
    paged_decode(launch, queries, pool, pool, tables, lengths, token, max_context=16384, scale=1.0, window=window)
    assert grids[0][2] == expected
