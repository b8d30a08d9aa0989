"""The noise of a draw: a hash of a row's key and a token's id, the same on every device. Knows nothing of draws;
metal/draw.h has its text for kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

MIXERS = (0x7FEB352D, 0x846CA68B)
"""The factors of mixed_bits()."""

_FACTORS = [np.uint32(factor) for factor in MIXERS]


def mixed_bits(values: Any, factors: Sequence[Any]) -> Any:
    """A 32-bit finaliser, by Chris Wellons' search for low bias, of uint32 values, mlx's or numpy's as the `factors`,
    MIXERS, are."""
    values = (values ^ (values >> 16)) * factors[0]
    values = (values ^ (values >> 15)) * factors[1]
    return values ^ (values >> 16)


def host_gumbel(key: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Gumbel noise, float32 [N], of token ids [N] in a row whose key is uint32 [2]."""
    bits = mixed_bits(mixed_bits(ids.astype(np.uint32) ^ key[0], _FACTORS) + key[1], _FACTORS)
    # Exponential before it is Gumbel: a float resolves the small values, which become the large noise, best near 0.
    uniform = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    return -np.log(-np.log1p(-uniform))
