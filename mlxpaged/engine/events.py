"""What the engine tells a request's owner. Frozen values that cross threads; no mlx, no behaviour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..sched.requests import FinishReason, TokenLogprob

if TYPE_CHECKING:
    from ..model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one reply. `completion_tokens` counts every sampled id, end token included;
    `cached_tokens` is the part of the prompt whose KV was found, fixed at first admission."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: `queued_s` until first scheduled, `ttft_s` until the first token, `total_s` until the end."""

    queued_s: float
    ttft_s: float
    total_s: float

    def tokens_per_s(self, completion_tokens: int) -> float:
        """Decode rate after the first token; 0 where there is no second token."""
        span = self.total_s - self.ttft_s
        return (completion_tokens - 1) / span if completion_tokens > 1 and span > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt is: `computed` of `total` tokens, `cached` of them found. While queued computed is 0 and
    `queue_position` the number of waiting requests that go before it; None from then on."""

    computed: int
    total: int
    cached: int
    queue_position: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one reply. The concatenation of `text` over a reply is the reply.

    `token_ids` are the ids sampled since the last delta (their text may still be held back: an unfinished UTF-8
    sequence, a possible stop string). `logprobs`, where asked for, run parallel to the ids whose text is released;
    `prompt_logprobs`, all of them before the first sampled id, to the prompt's ids from the second one on.
    The last delta, and only it, has `finish`, `usage` and `timing`; with finish ERROR, `error` says why.
    `stop_reason` is the stop string or token id that ended the reply, None for an end-of-turn token.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    progress: Progress | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    usage: Usage | None = None
    timing: Timing | None = None


Sink = Callable[[Delta], None]
"""Called on the engine thread, in order, once per delta; must not block and must not raise."""


@dataclass(frozen=True, slots=True)
class RowStats:
    """One live request as a face may draw it."""

    request_id: int
    state: str  # "queued" | "prefill" | "decode"
    prompt_tokens: int
    computed_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_blocks: int
    age_s: float
    tokens_per_s: float = 0.0  # since the first token
    queue_position: int | None = None  # while queued: waiting requests that go before it


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`count` neighbouring blocks of one owner: a request id, or "shared", "cached" or "free"."""

    owner: int | str
    count: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot, taken between two steps. Blocks are counted over all KV groups; block 0 is not counted.
    `block_runs` holds, for each KV group, whose its blocks are, from block 1 on."""

    model: str | None = None
    rows: tuple[RowStats, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0  # referenced by a live row
    blocks_shared: int = 0  # referenced by two rows or more
    blocks_cached: int = 0  # unreferenced, findable by hash
    blocks_free: int = 0  # unreferenced, not findable
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    memory_bytes: int = 0
    heartbeat_s: float = 0.0  # seconds since the engine thread last turned its loop, 0 while idle
    block_runs: tuple[tuple[BlockRun, ...], ...] = ()
    memory_active_bytes: int = 0  # what MLX uses now, used at most, and keeps for reuse
    memory_peak_bytes: int = 0
    memory_cache_bytes: int = 0
    load_s: float = 0.0  # what loading the resident model took


@dataclass(frozen=True, slots=True)
class Loading:
    """A model on its way into memory: how many bytes of what are fetched; zero once its files are only read."""

    model: str
    label: str = ""
    done_bytes: int = 0
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A resident model as faces see it. `served_by` is "paged" or "one at a time"; `notes` are lines a person
    should read once (a fall-back, a conversion). `defaults` are the model's own sampling defaults. `quantisation` is
    how its files store weights ("4 bits, groups of 64", "Q4_1", "bfloat16"), `family` its architecture's name."""

    name: str
    context_len: int
    max_prompt: int  # the longest prompt the context and the KV pool admit, with one token of reply
    vocab_size: int
    tokenizer: Tokenizer
    created: int  # Unix time of loading
    served_by: str = "paged"
    notes: tuple[str, ...] = ()
    defaults: dict[str, float] = field(default_factory=dict)
    load_s: float = 0.0  # what loading took
    quantisation: str | None = None
    family: str | None = None
    longest_context: int | None = None  # what the model was made for

    def flag_for_more(self) -> str | None:
        """The flag that admits longer prompts; None where the model itself is the limit."""
        if self.max_prompt + 1 < self.context_len:
            return "--memory-budget"
        return None if self.context_len == self.longest_context else "--ctx"
