"""What is said of sessions that change. Owns the words for it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Flag, auto


class Change(Flag):
    """What of a session is to be redrawn."""

    LIST = auto()  # sessions came or went
    TURNS = auto()  # turns came, went or ended
    TEXT = auto()  # the open reply grew, its text or only its count
    PHASE = auto()  # what it is doing
    ENGINE = auto()  # the connection or the model


Changed = Callable[[str, Change], None]
"""Told (session id, what changed), often: once a token. The id is empty where every session is meant."""
