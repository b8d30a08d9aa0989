"""The nouns every layer shares: what is asked for, what one step does, what it gave. Frozen values, no behaviour
beyond checking themselves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from ..errors import BadParameter, shown

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
LEAST_TEMPERATURE = 1e-5


class FinishReason(StrEnum):
    """Why a request ended. `STOP`: an end token or a stop string; `LENGTH`: max_tokens, context or memory."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Every default is neutral (greedy, no filter).

    temperature 0 is greedy, and so is one below LEAST_TEMPERATURE. top_k 0, top_p 1, min_p 0 and the penalties'
    defaults switch the effect off. max_tokens None means until the context is full, 0 that only the prompt is
    computed. `logprobs` None: none; k: the chosen token's and the k best; `prompt_logprobs` likewise, of the prompt's
    own ids from the second one on. `seed` None: drawn by the engine, so that a reply can be repeated from its record.
    `choice` is the index among n replies to one prompt; noise is a function of (seed, choice, position) only.
    `continues_text`: the prompt is plain text that the reply goes on from, so a first word keeps its space.
    `stop_after`: ids of a marker (end of thinking) after which stop strings are armed; empty: from the start.
    `stop_until`: ids of a marker (start of thinking) up to which they are armed too; empty: `stop_after` says all.
    `shown_special_ids`: special tokens whose text is part of the reply although the others are skipped.
    Raises BadParameter, naming the field, when a value is out of range.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    choice: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_after: tuple[int, ...] = ()
    stop_until: tuple[int, ...] = ()
    shown_special_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    continues_text: bool = False

    def __post_init__(self) -> None:
        self._range("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "0 or more, or none")
        self._range("temperature", 0 <= self.temperature <= 100, "from 0 (greedy) to 100")
        self._range("top_p", 0 < self.top_p <= 1, "above 0, up to 1 (off)")
        self._range("top_k", 0 <= self.top_k < 2**31, "from 0 (off) to 2147483647")
        self._range("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1")
        self._range("repetition_penalty", 0 < self.repetition_penalty <= 10, "above 0, up to 10; 1 is off")
        self._range("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2")
        self._range("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2")
        self._range("logit_bias", all(-100 <= bias <= 100 for _, bias in self.logit_bias), "biases from -100 to 100")
        self._range("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "from -2^63 to 2^63-1")
        self._range("stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings")
        self._range("min_tokens", 0 <= self.min_tokens < 2**31, "from 0 to 2147483647")
        self._range("choice", 0 <= self.choice < 2**31, "from 0 to 2147483647")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            self._range(name, count is None or 0 <= count <= MAX_TOP_LOGPROBS, f"from 0 to {MAX_TOP_LOGPROBS}")

    def _range(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise BadParameter(f"{name} is {shown(getattr(self, name))}; it must be {allowed}", param=name)


class Grammar(Protocol):
    """What one reply may say next, in ids. Made by a face, used on the engine thread only."""

    def fill(self, mask: np.ndarray) -> None:
        """Set the bits of the allowed ids in `mask` (uint32 words, lowest id in the lowest bit; all clear before)."""

    def advance(self, token_id: int) -> bool:
        """Take the next id in; True when the reply is complete and nothing may follow."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the scheduler sees it: token ids in, token ids out. `salt` keeps apart KV that must not be
    shared (another adapter, another tenant). `end_token_ids` end a reply with STOP unless ignore_eos."""

    request_id: int
    prompt: np.ndarray  # int32 [prompt length], at least one id
    sampling: SamplingParams
    end_token_ids: frozenset[int] = frozenset()
    salt: bytes = b""
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, start + length) of a row's known ids, whose KV this step computes. `logprobs` None: no logits
    are needed; k: the logprob of each position's next id is wanted, and the k best."""

    row: int
    start: int
    length: int
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy on write: the first `slots` slots of block `source` go to `destination`, in every layer of `group`."""

    group: int
    source: int
    destination: int
    slots: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: copies first, then all K/V writes, then attention; decode entries sample, chunks do not. Decode entries
    come longest context first, so that a padded batch of them can be cut into parts of like length.

    A row may appear both as a chunk and, for its last known id, as a decode entry of the same step.
    """

    step: int
    decode_rows: np.ndarray  # int32 [B]
    decode_positions: np.ndarray  # int32 [B]: the position of each entry's input token
    from_device: np.ndarray  # bool [B]: the input id was sampled by a step the host has not seen yet
    chunks: tuple[Chunk, ...] = ()
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV this step computes."""
        return len(self.decode_rows) + sum(chunk.length for chunk in self.chunks)

    def rows(self) -> set[int]:
        """Every row this step touches."""
        return {*self.decode_rows.tolist(), *(chunk.row for chunk in self.chunks)}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """log p of a sampled token under the raw distribution, and of the best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step's decode entries sampled, in the plan's order. `logprobs` is None where not asked for.
    `prompt_logprobs` has one tuple for each chunk that asked, in the plan's order: one entry a position."""

    token_ids: np.ndarray  # int32 [B]
    logprobs: list[TokenLogprob | None] | None = None
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
