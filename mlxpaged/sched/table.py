"""The state table: one row per live request, for life, as numpy columns. Written by the scheduler only; the runner
reads gathered copies. Knows nothing of mlx, policies or text."""

from __future__ import annotations

import numpy as np

from ..config import BLOCK_SIZE
from ..errors import InvariantError
from .requests import LEAST_TEMPERATURE, Request, SamplingParams

_FIRST_WIDTH = 256


class RequestTable:
    """R rows. Of a row's positions, with `total = length + pending`:

        0 ........ computed ........ scheduled ........ total ........ limit
        |  committed  |   in flight    |   known, to do   |   never exceeded

    `[0, computed)` is KV that a finished step wrote, or that was found (its last block may be copied by the row's next
    step): the only part matched, published or shared. `[computed, scheduled)` is being computed; a plan starts at
    `scheduled`. `length` counts ids the host knows, `pending` those that steps in flight will sample.
    `block_ids[g][row, i]` holds positions [16 i, 16 i + 16) in KV group g; 0 where given back behind a window.
    `first_block` and `num_blocks` bound the held ones.
    """

    def __init__(self, num_rows: int, context_len: int, num_groups: int = 1) -> None:
        self.num_rows = num_rows
        self.context_len = context_len
        self.num_groups = num_groups
        self.token_ids: np.ndarray = _ints(num_rows, min(_FIRST_WIDTH, context_len))
        self.block_ids: list[np.ndarray] = [
            _ints(num_rows, blocks_for(self.token_ids.shape[1])) for _ in range(num_groups)
        ]
        self.first_block = _ints(num_groups, num_rows)
        self.num_blocks = _ints(num_groups, num_rows)
        self.active = np.zeros(num_rows, bool)
        self.epoch = np.zeros(num_rows, np.int64)  # counts a row's tenants
        self.arrival = np.zeros(num_rows, np.int64)
        self.length, self.prompt_len, self.pending = _ints(num_rows), _ints(num_rows), _ints(num_rows)
        self.computed, self.scheduled, self.limit = _ints(num_rows), _ints(num_rows), _ints(num_rows)
        # Sampling columns; what is ragged (logit_bias, end ids) is read from `requests`.
        self.temperature, self.top_p, self.min_p = (np.zeros(num_rows, np.float32) for _ in range(3))
        self.repetition, self.presence, self.frequency = (np.zeros(num_rows, np.float32) for _ in range(3))
        self.top_k, self.choice, self.logprobs = _ints(num_rows), _ints(num_rows), _ints(num_rows)
        self.min_tokens = _ints(num_rows)
        self.biased = np.zeros(num_rows, bool)
        self.constrained = np.zeros(num_rows, bool)  # by a grammar
        self.seed = np.zeros(num_rows, np.uint64)
        self.requests: list[Request | None] = [None] * num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def total(self) -> np.ndarray:
        """int32 [R]: ids known to the host or, for the last `pending` of them, only to the device."""
        return self.length + self.pending

    def assign(self, request: Request, ids: np.ndarray, arrival: int, limit: int) -> int:
        """A free row filled with `ids` (the prompt and, after a preemption, the reply so far) and its sampling."""
        row = self._free_rows.pop()
        self.reserve(len(ids))
        self.epoch[row] += 1
        self.active[row] = True
        self.arrival[row] = arrival
        self.requests[row] = request
        self.token_ids[row, : len(ids)] = ids
        self.length[row], self.prompt_len[row], self.limit[row] = len(ids), len(request.prompt), limit
        self.pending[row] = self.computed[row] = self.scheduled[row] = 0
        self._write_sampling(row, request.sampling)
        self.constrained[row] = request.grammar is not None
        return row

    def free(self, row: int) -> None:
        """End a row's tenancy; its blocks must have been given back."""
        if np.any(self.num_blocks[:, row] > self.first_block[:, row]):
            raise InvariantError(f"row {row} is freed while it holds blocks")
        self.active[row] = False
        self.requests[row] = None
        self.first_block[:, row] = self.num_blocks[:, row] = 0
        self._free_rows.append(row)

    def append(self, row: int, token_id: int) -> None:
        """One more id the host knows."""
        self.reserve(int(self.length[row]) + 1)
        self.token_ids[row, self.length[row]] = token_id
        self.length[row] += 1

    def held(self, group: int, row: int) -> np.ndarray:
        """A view of the block ids a row holds in one group, first to last."""
        return self.block_ids[group][row, self.first_block[group, row] : self.num_blocks[group, row]]

    def _write_sampling(self, row: int, sampling: SamplingParams) -> None:
        self.temperature[row] = sampling.temperature if sampling.temperature >= LEAST_TEMPERATURE else 0
        self.top_p[row], self.min_p[row] = sampling.top_p, sampling.min_p
        self.top_k[row], self.choice[row], self.min_tokens[row] = sampling.top_k, sampling.choice, sampling.min_tokens
        self.repetition[row] = sampling.repetition_penalty
        self.presence[row], self.frequency[row] = sampling.presence_penalty, sampling.frequency_penalty
        self.logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self.biased[row] = bool(sampling.logit_bias)
        self.seed[row] = np.uint64((sampling.seed or 0) % 2**64)

    def reserve(self, num_tokens: int) -> None:
        """Make the columns wide enough for a row of `num_tokens`; widths double, so this copies seldom."""
        width = self.token_ids.shape[1]
        if num_tokens <= width:
            return
        while width < num_tokens:
            width *= 2
        width = min(width, self.context_len)
        self.token_ids = _with_width(self.token_ids, width)
        self.block_ids = [_with_width(ids, blocks_for(width)) for ids in self.block_ids]


def _ints(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


def _with_width(array: np.ndarray, width: int) -> np.ndarray:
    wider = np.zeros((array.shape[0], width), array.dtype)
    wider[:, : array.shape[1]] = array
    return wider
