"""Draws for the grid of cases: every filter at vocabularies around a slice, among ties and hidden logits."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxpaged.kernels.draw import OFF, SLICE, draw, draw_reference, packed_wishes
from mlxpaged.kernels.launch import Launcher


@dataclass(frozen=True)
class DrawCase:
    """`rows` rows of `vocab` logits, `spread` wide; `wished` filters are on in each row."""

    vocab: int
    rows: int = 12
    spread: float = 2.0
    wished: str = "min_p top_p top_k"
    rounded: bool = False
    hidden: int = 0
    overflowed: int = 0
    tolerance: float = 0.0

    @property
    def name(self) -> str:
        parts = [f"draw {self.rows} x {self.vocab} spread {self.spread} {self.wished or 'of all'}"]
        return " ".join(
            [
                *parts,
                *["rounded"] * self.rounded,
                *[f"{self.hidden} hidden"] * bool(self.hidden),
                *[f"{self.overflowed} NaN"] * bool(self.overflowed),
            ]
        )

    def run(self, launch: Launcher) -> float:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        logits = self.spread * rng.standard_normal((self.rows, self.vocab)).astype(np.float32)
        if self.rounded:
            logits = np.round(logits)
        logits[:, rng.permutation(self.vocab)[: self.hidden]] = -1e30
        logits[:, rng.permutation(self.vocab)[: self.overflowed]] = np.nan
        least, top_p, top_k = (np.full(self.rows, value) for value in (-1e30, OFF, float(self.vocab)))
        if "min_p" in self.wished:
            least = np.log(rng.uniform(0.001, 0.5, self.rows))
        if "top_p" in self.wished:
            top_p = rng.choice([1e-6, 0.3, 0.9, 0.99], self.rows)
        if "top_k" in self.wished:
            top_k = np.minimum(rng.choice([1, 2, 5, 40, 900], self.rows), self.vocab)
        noise = rng.integers(0, 1 << 32, (self.rows, 2), np.uint32)
        wishes = packed_wishes(rng.uniform(0.05, 2, self.rows), least, top_p, top_k, noise)
        drawn = np.array(draw(launch, mx.array(logits), mx.array(wishes)))
        return float((drawn != draw_reference(logits, wishes)).mean())


def draw_cases() -> Iterator[DrawCase]:
    for vocab in (8, 9, 31, 33, 1000, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE + 7):
        yield DrawCase(vocab)
    for wished in ("", "min_p", "top_p", "top_k", "min_p top_p", "min_p top_k", "top_p top_k"):
        for rounded in (False, True):
            yield DrawCase(SLICE + 100, wished=wished, rounded=rounded)
        yield DrawCase(500, wished=wished, hidden=495)
    yield DrawCase(1000, spread=0.01)
    yield DrawCase(1000, spread=30.0)
    yield DrawCase(700, rounded=True, spread=0.1)  # all are equal
    yield DrawCase(600, hidden=600)
    yield DrawCase(2000, rows=1)
    yield DrawCase(1500, hidden=700, overflowed=2)
    yield DrawCase(40, wished="", overflowed=40)
