"""draw: one id a row from its logits, by temperature, min-p, top-k, top-p and Gumbel noise, without a sort."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from ..errors import LayoutError
from .launch import SIMD_WIDTH, SMALLEST_DEVICE_INPUT, Launcher, kernel_spec
from .noise import host_gumbel

SLICE = 4096
"""Logits whose noise one threadgroup computes."""

WISHES = 8
"""Words of a row's wishes; metal/draw.h says which is which."""

SIMDGROUPS = (8, 16)
"""Of a threadgroup of each half. The second's only one looks at a whole row."""

OFF = 2.0
"""As top-p: no sum of shares reaches it."""

PARTS_SPEC = kernel_spec(
    "draw_parts",
    inputs=("logits", "wishes"),
    outputs=("weights", "scores", "ids"),
    headers=("simd.h", "draw.h"),
)
SPEC = kernel_spec(
    "draw",
    inputs=("logits", "wishes", "weights", "scores", "ids"),
    outputs=("drawn",),
    headers=("simd.h", "draw.h"),
)


def packed_wishes(
    temperature: np.ndarray, least: np.ndarray, top_p: np.ndarray, top_k: np.ndarray, noise: np.ndarray
) -> np.ndarray:
    """What draw() takes for S rows: uint32 [S, WISHES]. temperature: above 0. least: how far below the best logit over
    the temperature one may be, as log(min-p); -1e30: any. top_p: OFF or up to 1. top_k: the vocabulary's size or less,
    at least 1. noise: uint32 [S, 2], the key of the row's noise."""
    wishes = np.zeros((len(temperature), WISHES), np.uint32)
    for place, column in enumerate((temperature, least, top_p)):
        wishes[:, place] = column.astype(np.float32).view(np.uint32)
    wishes[:, 3], wishes[:, 4:6] = top_k, noise
    return wishes


def draw(launch: Launcher, logits: mx.array, wishes: mx.array) -> mx.array:
    """ids int32 [S] from logits float32 [S, V] by packed_wishes() [S, WISHES]. What min-p hides top-k does not count;
    top-p's shares are those of what both let stay; logits equal to the least that stays all stay. Raises LayoutError.
    """
    num_rows, vocab_size = logits.shape
    if logits.dtype != mx.float32 or wishes.shape != (num_rows, WISHES) or wishes.dtype != mx.uint32:
        raise LayoutError(
            f"logits is {logits.shape} {logits.dtype}, wishes {wishes.shape} {wishes.dtype}; they must be float32 "
            f"[rows, vocabulary] and uint32 [rows, {WISHES}]"
        )
    if logits.size < SMALLEST_DEVICE_INPUT:
        raise LayoutError(f"logits is {logits.shape}; a kernel takes {SMALLEST_DEVICE_INPUT} elements at least")
    # A small vocabulary's last slices are empty: fewer would make the parts another kind of input.
    slices = max(math.ceil(vocab_size / SLICE), SMALLEST_DEVICE_INPUT)
    threads = [count * SIMD_WIDTH for count in SIMDGROUPS]
    parts = launch(
        PARTS_SPEC,
        [logits, wishes],
        template=[("SLICE", SLICE), ("SIMDGROUPS", SIMDGROUPS[0])],
        grid=(threads[0] * slices, num_rows, 1),
        threadgroup=(threads[0], 1, 1),
        shapes=[(num_rows, slices, 2), (num_rows, slices), (num_rows, slices)],
        dtypes=[mx.float32, mx.float32, mx.int32],
    )
    (drawn,) = launch(
        SPEC,
        [logits, wishes, *parts],
        template=[("SIMDGROUPS", SIMDGROUPS[1])],
        grid=(threads[1] * num_rows, 1, 1),
        threadgroup=(threads[1], 1, 1),
        shapes=[(num_rows,)],
        dtypes=[mx.int32],
    )
    return drawn


def draw_reference(logits: np.ndarray, wishes: np.ndarray) -> np.ndarray:
    """The same by its definition, from sorted logits, in float64 but for the noise."""
    drawn = []
    # An overflowed row gets its first id without a number: no mask hides that.
    for row, words in zip(logits.astype(np.float64), wishes, strict=True):
        if np.isnan(row).any():
            drawn.append(int(np.argmax(np.isnan(row))))
            continue
        temperature, least, top_p = words[:3].view(np.float32).astype(np.float64)
        scaled = row / temperature
        stay = scaled >= scaled.max() + least
        largest = np.sort(scaled[stay])[::-1][: int(words[3])]
        share = np.exp(largest - largest[0])
        kept = np.cumsum(share) - share < top_p * share.sum()
        kept[0] = True
        stay &= scaled >= largest[kept].min()
        scores = np.where(stay, scaled + host_gumbel(words[4:6], np.arange(len(row))), -np.inf)
        drawn.append(int(np.argmax(scores)))
    return np.array(drawn)
