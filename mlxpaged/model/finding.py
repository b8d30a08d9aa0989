"""One line of an examination. Owns the noun; never imports mlx, which may be what is missing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """`value` is what was found. `advice` is what a person can do about it; a `problem` makes doctor fail."""

    name: str
    value: str
    advice: str | None = None
    problem: bool = False
