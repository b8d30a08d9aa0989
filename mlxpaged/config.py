"""What a person may set, with its bounds. Owns names, defaults and MLXPAGED_* variables; imports nothing heavy.

Precedence is flag, then environment, then config.toml, then default; faces resolve it, the engine sees the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import ConfigError

DEFAULT_PORT = 8642
DEFAULT_MODEL = "smollm2"
BLOCK_SIZE = 16
"""Tokens in one block of KV, everywhere."""

Dtype = Literal["auto", "float32", "float16", "bfloat16", "keep"]
Attention = Literal["auto", "kernel", "plain"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine runs. None means: chosen from the device and the model when the model is loaded.

    context_len: the most tokens one request may hold (prompt and reply). max_rows: requests running at once.
    max_queue: requests waiting beyond that before Overloaded. step_budget: tokens one step may compute, unless
    more replies than that run.
    memory_budget: bytes for the model: weights, KV pool and work. num_blocks: blocks of the pool, overrides what the
    budget gives, and start_blocks: those that it begins with (both for tests). kv_share: the part to use of what the
    budget leaves to KV.
    ahead: steps launched before the last one's tokens are read. prefix_cache: share KV between requests.
    idle_unload_s: seconds without a request after which the model gives its memory back; None: never.
    compiled: replay decode steps as compiled graphs where our kernels run; off helps to find a fault.
    attention: our GPU kernels or plain MLX operations; auto takes the kernels where they pass their self-test.
    """

    dtype: Dtype = "auto"
    context_len: int | None = None
    max_rows: int = 32
    max_queue: int = 512
    step_budget: int | None = None
    memory_budget: int | None = None
    num_blocks: int | None = None
    start_blocks: int | None = None
    kv_share: float = 1.0
    ahead: int | None = None
    prefix_cache: bool = True
    idle_unload_s: float | None = None
    attention: Attention = "auto"
    compiled: bool = True

    def __post_init__(self) -> None:
        self._at_least("--ctx", self.context_len, 16)
        self._at_least("--max-num-seqs", self.max_rows, 1)
        self._at_least("--max-queue", self.max_queue, 0)
        self._at_least("--step-budget", self.step_budget, 1)
        self._at_least("--memory-budget", self.memory_budget, 1)
        self._at_least("--idle-unload", self.idle_unload_s, 1)
        self._at_least("num_blocks", self.num_blocks, 2)
        self._at_least("start_blocks", self.start_blocks, 2)
        if self.attention not in get_args(Attention):
            raise ConfigError(f"--attention is {self.attention!r}; it must be one of {', '.join(get_args(Attention))}")

    @staticmethod
    def _at_least(flag: str, value: float | None, least: int) -> None:
        if value is not None and value < least:
            raise ConfigError(f"{flag} is {value}; it must be at least {least}")
