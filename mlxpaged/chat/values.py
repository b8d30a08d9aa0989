"""The sampling values that a person sets in a conversation: their names and bounds. Owns reading them from words, alike
in every face; keeps none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import BadParameter
from ..sched.requests import SamplingParams

MAX_TEMPERATURE = 2
"""What the server takes over HTTP, so that a value means the same with and without a server."""

SETTABLE = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
_WHOLE = {"max_tokens", "top_k", "seed"}


def with_value(
    params: Mapping[str, float], name: str, text: str, others: Mapping[str, float] | None = None
) -> dict[str, float]:
    """`params` with one value set, or given back to the model with `default`. `others` hold where params say nothing.
    Raises BadParameter for an unknown name, a text that is no number, and a value out of range."""
    name = name.removeprefix("--").replace("-", "_")
    if name not in SETTABLE:
        raise BadParameter(f"there is no parameter {name}; settable are {', '.join(SETTABLE)}", param=name)
    if text == "default":
        return {key: value for key, value in params.items() if key != name}
    value = _number(name, text)
    if name == "max_tokens" and value < 1:
        raise BadParameter(f"max_tokens is {text}; it must be at least 1, or default", param=name)
    if name == "temperature" and not 0 <= value <= MAX_TEMPERATURE:
        allowed = f"from 0 (greedy) to {MAX_TEMPERATURE}"
        raise BadParameter(f"temperature is {text}; it must be {allowed}, or default", param=name)
    changed: dict[str, Any] = {**(others or {}), **params, name: value}
    SamplingParams(**changed)
    return {**params, name: value}


def _number(name: str, text: str) -> float:
    try:
        return int(text) if name in _WHOLE else float(text)
    except ValueError:
        kind = "a whole number" if name in _WHOLE else "a number"
        raise BadParameter(f"{name} is {text!r}; write {kind}, or default", param=name) from None
