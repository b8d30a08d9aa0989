"""Into how many partitions paged_decode divides its rows. Pure; never imports mlx."""

from __future__ import annotations

import math

MOST_TOKENS = 1024
"""Of a partition: a short row's threadgroups end long before a longer one's, and what is left must spread evenly."""

LEAST_TOKENS = 128
"""Of a partition that was not needed for that: fewer would leave simdgroups without any."""

WHOLE_TOKENS = 512
"""A shorter row is not divided: the merge would cost what is saved."""

_FILL = 256
"""Threadgroups that keep a large GPU busy: an H200 runs 264 at once."""


def num_partitions(num_rows: int, heads: int, seen: int) -> int:
    """Partitions of each row, at least 1, where the longest of `num_rows` rows sees `seen` tokens and a partition of
    one row takes `heads` threadgroups. Few rows are divided further than MOST_TOKENS asks, until the device is full.

    On an H200, microseconds for 8 K/V heads of width 128 undivided and divided so: one row of 560 tokens 13 and 9 (2
    of them for the merge), 8 rows of 64 to 2048 tokens 28 (by 1024 tokens) and 20, 32 such rows 60 and 57.
    """
    if seen < WHOLE_TOKENS:
        return 1
    longer_rows = -(-num_rows // 2)  # rows of different lengths are half as long as the longest on average
    filling = min(seen // LEAST_TOKENS, _FILL // (heads * longer_rows))
    return max(1, math.ceil(seen / MOST_TOKENS), filling)
