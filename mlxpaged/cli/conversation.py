"""One conversation of `mlxpaged chat`. Owns its turns, its system message and its sampling values; knows nothing of
terminals or engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..chat.messages import Messages
from ..errors import BadParameter, ConfigError
from ..sched.requests import SamplingParams
from .options import sampling_values

_WHOLE = {"max_tokens", "top_k", "seed", "min_tokens"}
_SETTABLE = (
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


@dataclass
class Conversation:
    """Turns so far; `values` are the sampling values asked for, which go over the model's own defaults."""

    system: str | None = None
    values: dict[str, float] = field(default_factory=dict)
    turns: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """Adds what the person says."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Adds a reply, whole or as far as it came."""
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Removes the last thing said: it got no answer."""
        self.turns.pop()

    def clear(self) -> None:
        """Forgets every turn; the system message and the sampling values stay."""
        self.turns.clear()

    def messages(self) -> Messages:
        """The conversation as the backend takes it."""
        system = ({"role": "system", "content": self.system},) if self.system else ()
        return Messages((*system, *self.turns))

    def sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        """How the next reply is sampled; `defaults` are the model's own values."""
        return SamplingParams(**sampling_values(self.values, defaults))

    def shown_values(self, defaults: Mapping[str, float]) -> str:
        """Every settable value as it stands, one per line."""
        sampling = self.sampling(defaults)
        shown = {name: getattr(sampling, name) for name in _SETTABLE}
        return "\n".join(f"{name:18} {'-' if value is None else value}" for name, value in shown.items())

    def set_value(self, name: str, text: str) -> None:
        """Sets one sampling value, or gives it back to the model with `default`.

        Raises ConfigError for a name or a text that is no number, BadParameter when it is out of range.
        """
        name = name.removeprefix("--").replace("-", "_")
        if name not in _SETTABLE:
            raise ConfigError(f"there is no parameter {name}; settable are {', '.join(_SETTABLE)}")
        if text == "default":
            self.values.pop(name, None)
            return
        value = _number(name, text)
        if name == "max_tokens" and value < 1:
            raise BadParameter(f"max_tokens is {text}; it must be at least 1, or default", param=name)
        changed: dict[str, Any] = {**self.values, name: value}
        SamplingParams(**changed)
        self.values[name] = value


def _number(name: str, text: str) -> float:
    try:
        return int(text) if name in _WHOLE else float(text)
    except ValueError:
        kind = "a whole number" if name in _WHOLE else "a number"
        raise ConfigError(f"{name} is {text!r}; write {kind}, or default") from None
