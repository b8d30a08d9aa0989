"""Which prompts are computed in the next step, and which waiting requests become rows for it. Owns admission; the rows,
the queue and the blocks belong to the scheduler that asks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .allocator import KVAllocator
from .queue import Live, PromptQueue
from .requests import BlockCopy, Chunk
from .table import BLOCK_SIZE, RequestTable
from .tenants import Tenants


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """A step's prompt work: its chunks, the copies that come first, and the rows whose last known id joins the decode
    entries because their final chunk is among these."""

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...]
    joined: list[int]


class PromptPlanner:
    """Fills what decoding leaves of a step's budget; those it admits become `tenants` with a row. Logits of at most
    `score_budget` prompt tokens a step are asked for: they are as wide as the vocabulary."""

    def __init__(
        self,
        table: RequestTable,
        blocks: KVAllocator,
        queue: PromptQueue,
        tenants: Tenants,
        *,
        step_budget: int,
        score_budget: int,
    ) -> None:
        self.prompt_tokens = self.cached_tokens = 0
        self._table = table
        self._blocks = blocks
        self._queue = queue
        self._tenants = tenants
        self._step_budget = step_budget
        self._score_budget = score_budget

    def plan(self, budget: int) -> PromptPlan:
        """Fill `budget` tokens with prompt work, admitting what finds room."""
        chunks: list[Chunk] = []
        copies: list[BlockCopy] = []
        joined: list[int] = []
        left = self._tenants.left
        candidates = [live for live in self._tenants.by_row.values() if left(live) > 0 and live.leaving is None]
        candidates += self._queue.waiting
        candidates.sort(key=lambda live: self._queue.rank(live, left(live)))
        admitting = True
        for live in candidates:
            if budget <= 0:
                break
            if live.row is None:
                if not admitting or self._is_being_computed(live):
                    continue
                admitting = self._admit(live, copies)
                if not admitting:
                    continue
            scored = sum(chunk.length for chunk in chunks if chunk.logprobs is not None)
            room = budget if live.to_score is None else min(budget, self._score_budget - scored)
            used, joins = self._plan_prompt(live, room, chunks)
            budget -= used
            if joins:
                assert live.row is not None
                joined.append(live.row)
        return PromptPlan(tuple(chunks), tuple(copies), joined)

    def _plan_prompt(self, live: Live, budget: int, chunks: list[Chunk]) -> tuple[int, bool]:
        """One row's share of a step: (tokens used, whether its last id joins)."""
        table, row = self._table, live.row
        assert row is not None
        start, left = int(table.scheduled[row]), self._tenants.left(live)
        length, joins = min(left, budget), left <= budget
        if not self._blocks.extend(row, start + length + joins):
            joins = False
            room = self._blocks.room() + int(table.num_blocks[:, row].min())
            length = min(length, room * BLOCK_SIZE - start)
            if length <= 0 or not self._blocks.extend(row, start + length):
                return 0, False
        if length:
            chunks.append(Chunk(row, start, length, live.to_score))
            table.scheduled[row] += length
            self._queue.worked(length)
        return length + joins, joins

    def _is_being_computed(self, live: Live) -> bool:
        """Whether a running row will soon publish the next block this prompt lacks: then it is worth the wait."""
        if not self._blocks.share or live.to_score is not None:
            return False
        table = self._table
        known = len(self._blocks.tree.walk(live.ids[:-1], live.salt)) * BLOCK_SIZE
        end = known + BLOCK_SIZE
        if end > len(live.ids) - 1:
            return False
        for row, other in self._tenants.by_row.items():
            soon = table.computed[row] < end <= table.length[row] and other.leaving is None and other.salt == live.salt
            if soon and np.array_equal(table.token_ids[row, :end], live.ids[:end]):
                return True
        return False

    def _admit(self, live: Live, copies: list[BlockCopy]) -> bool:
        """Give a waiting request a row and the blocks that are known already, if its whole prompt will find room
        beside those already admitted."""
        table, blocks = self._table, self._blocks
        if table.num_free_rows == 0:
            return False
        known = live.ids[:-1] if live.to_score is None else live.ids[:0]  # logits need every token computed
        match = blocks.match(known, live.salt)
        need = blocks.peak(len(live.ids) + 1, match.tip.depth, self._step_budget)
        for other in self._tenants.by_row.values():
            if self._tenants.left(other) > 0:
                held = int(table.num_blocks[:, other.row].max())
                more = blocks.peak(int(table.total[other.row]) + 1, held, self._step_budget)
                need = [mine + theirs for mine, theirs in zip(need, more, strict=True)]
        alone = not self._tenants.by_row
        if not blocks.fits(need) and not (alone and blocks.fits([1] * len(need))):
            blocks.unmatch(match)
            return False
        self._seat(live, match.num_tokens)
        assert live.row is not None
        copies += blocks.adopt(live.row, match)
        self._queue.waiting.remove(live)
        return True

    def _seat(self, live: Live, cached: int) -> None:
        request, table = live.request, self._table
        most = request.sampling.max_tokens
        # Even a reply of no tokens has its one decode entry: what that samples is dropped.
        limit = table.context_len if most is None else min(table.context_len, len(request.prompt) + max(most, 1))
        live.row = table.assign(request, live.ids, live.arrival, limit)
        self._tenants.by_row[live.row] = live
        self._queue.worked(cached)
        if live.cached_tokens is None:
            live.cached_tokens = cached
            self.cached_tokens += cached
            self.prompt_tokens += len(request.prompt)
