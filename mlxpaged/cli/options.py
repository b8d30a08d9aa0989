"""Flags that several commands share, each with its MLXPAGED_* variable. Owns what they mean in words and how they
become an EngineConfig or SamplingParams; imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args

import typer

from ..config import Attention, Dtype, EngineConfig
from ..errors import BadParameter, ConfigError

_MODEL_HELP = "A hub id (org/name), a folder, a .gguf file, or smollm2."

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP, envvar="MLXPAGED_MODEL")]
OptionalModelArgument = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help=_MODEL_HELP, envvar="MLXPAGED_MODEL")
]


def _flag(name: str, text: str, *more: str, **extra: Any) -> Any:
    """An option whose environment variable is MLXPAGED_ and its name."""
    variable = "MLXPAGED_" + name.removeprefix("--").split("/")[0].replace("-", "_").upper()
    return typer.Option(name, *more, help=text, envvar=variable, show_default=False, **extra)


MaxTokens = Annotated[int | None, _flag("--max-tokens", "Most tokens to answer with [until the context is full].")]
Temperature = Annotated[float | None, _flag("--temperature", "0 (greedy) to 2 [the model's own, else 0].")]
TopP = Annotated[float | None, _flag("--top-p", "Sample from the likeliest tokens of this total probability.")]
TopK = Annotated[int | None, _flag("--top-k", "Sample from this many likeliest tokens; 0 is off.")]
MinP = Annotated[float | None, _flag("--min-p", "Drop tokens below this share of the likeliest one's probability.")]
Seed = Annotated[int | None, _flag("--seed", "Repeats a reply [a new one each time].")]
System = Annotated[str | None, _flag("--system", "System message before the conversation.", "-s")]

DtypeFlag = Annotated[str, _flag("--dtype", f"Weights in memory: {', '.join(get_args(Dtype))} [auto].")]
ContextFlag = Annotated[int | None, _flag("--ctx", "Most tokens of one conversation [the model's own].")]
MaxRows = Annotated[int, _flag("--max-num-seqs", "Requests running at once [32].")]
MaxQueue = Annotated[int, _flag("--max-queue", "Requests waiting beyond those [512].")]
StepBudget = Annotated[int | None, _flag("--step-budget", "Most tokens computed in one step [by device].")]
MemoryBudget = Annotated[str | None, _flag("--memory-budget", "Memory for model and K/V, as 12GB or 80MB [by device].")]
PrefixCache = Annotated[bool, _flag("--prefix-cache/--no-prefix-cache", "Reuse the K/V of equal prompt starts [on].")]
AttentionFlag = Annotated[
    str, _flag("--attention", f"Attention by {', '.join(get_args(Attention))}: GPU kernels or plain MLX [auto].")
]
ApiKey = Annotated[str | None, _flag("--api-key", "The key that the server at --url asks for.")]
Url = Annotated[str | None, _flag("--url", "Use the server at this address, not this user's own.")]


def port_number(text: str) -> int:
    """The port that a flag names; 0 is allowed. Raises typer.BadParameter."""
    try:
        if 0 <= (port := int(text)) <= 65535:
            return port
    except ValueError:
        pass
    raise typer.BadParameter(f"{text!r} is no port; give 1 to 65535, or 0 for a free one")


def as_flags(**values: object) -> tuple[str, ...]:
    """Values as flags of a command line; those that were not given, and `auto`, are left out."""
    given = {name: value for name, value in values.items() if value not in (None, "auto")}
    return tuple(word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value)))


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """What was asked for on the command line; None: not asked. Field names are SamplingParams' own."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None

    def given(self) -> dict[str, float]:
        """The flags that were set, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def check(self) -> None:
        """Raises ConfigError, naming the flag, when a value is out of range: before a model is loaded."""
        from ..chat.values import MAX_TEMPERATURE
        from ..sched.requests import SamplingParams

        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"--max-tokens is {self.max_tokens}; it must be at least 1, or left out")
        if self.temperature is not None and not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ConfigError(f"--temperature is {self.temperature}; it must be from 0 (greedy) to {MAX_TEMPERATURE}")
        try:
            SamplingParams(**self.given())  # type: ignore[arg-type]
        except BadParameter as error:
            raise ConfigError(with_flag_names(error)) from None


def by_source(context: typer.Context, flags: SamplingFlags) -> tuple[dict[str, float], dict[str, float]]:
    """The values that the configuration or a variable gave, and those typed on the command line of this call."""
    standing: dict[str, float] = {}
    typed: dict[str, float] = {}
    for name, value in flags.given().items():
        source = context.get_parameter_source(name)
        (typed if source is not None and source.name == "COMMANDLINE" else standing)[name] = value
    return standing, typed


def with_flag_names(error: BadParameter) -> str:
    """The error's text with the field named as its flag: top_p becomes --top-p."""
    name = error.param or ""
    return str(error).replace(name, "--" + name.replace("_", "-"), 1) if name else str(error)


def sampling_values(flags: Mapping[str, float], defaults: Mapping[str, float]) -> dict[str, Any]:
    """Keyword arguments for SamplingParams: what was asked for over the model's own defaults."""
    from ..sched.requests import SamplingParams

    known = {field.name for field in fields(SamplingParams)}
    own = {name: int(value) if name == "top_k" else value for name, value in defaults.items() if name in known}
    return {**own, **flags}


_CONFIG_FIELDS = {"ctx": "context_len", "max_num_seqs": "max_rows", "idle_unload": "idle_unload_s"} | {
    name: name for name in ("dtype", "memory_budget", "step_budget", "attention", "max_queue")
}


def check_flag(name: str, value: Any) -> None:
    """Raises ConfigError, naming the flag, where the flag `name` can never hold `value`, which has its type already."""
    if name in {field.name for field in fields(SamplingFlags)}:
        SamplingFlags(**{name: value}).check()
    elif name in _CONFIG_FIELDS:
        engine_config(**{"dtype": "auto", "context_len": None, _CONFIG_FIELDS[name]: value})


def engine_config(
    dtype: str,
    context_len: int | None,
    memory_budget: str | None = None,
    step_budget: int | None = None,
    attention: str = "auto",
    **rest: Any,
) -> EngineConfig:
    """The flags as an EngineConfig; ConfigError names the flag and what would work."""
    if dtype not in get_args(Dtype):
        raise ConfigError(f"--dtype is {dtype!r}; it must be one of {', '.join(get_args(Dtype))}")
    return EngineConfig(
        dtype=dtype,  # type: ignore[arg-type]
        context_len=context_len,
        memory_budget=None if memory_budget is None else byte_count("--memory-budget", memory_budget),
        step_budget=step_budget,
        attention=attention,  # type: ignore[arg-type]
        **rest,
    )


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def byte_count(flag: str, text: str) -> int:
    """Bytes from 6GB, 512MB, 1.5GiB or a plain number (powers of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if not match:
        raise ConfigError(f"{flag} is {text!r}; write a size like 6GB, 512MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])
