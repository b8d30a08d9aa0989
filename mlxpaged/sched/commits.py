"""What a finished step changes: progress of prompts, new ids, ends, blocks to publish. Owns the rules of when a reply
is over; which step it is, and whether it is its turn, is the scheduler's."""

from __future__ import annotations

from .allocator import KVAllocator
from .events import PromptEvent, TokenEvent
from .queue import Live
from .requests import Chunk, FinishReason, StepPlan, StepResult, TokenLogprob
from .table import BLOCK_SIZE, RequestTable
from .tenants import Tenants


class Commits:
    """Takes finished steps in, and counts the ids of all replies."""

    def __init__(self, table: RequestTable, blocks: KVAllocator, tenants: Tenants) -> None:
        self.generated_tokens = 0
        self._table = table
        self._blocks = blocks
        self._tenants = tenants

    def take(self, plan: StepPlan, result: StepResult) -> None:
        """Ids, ends, blocks to publish and to give back; what is to be told becomes the tenants' events."""
        scores = iter(result.prompt_logprobs)
        for chunk in plan.chunks:
            self._chunk(chunk, next(scores) if chunk.logprobs is not None else ())
        logprobs = result.logprobs or [None] * len(plan.decode_rows)
        entries = zip(
            plan.decode_rows.tolist(), plan.decode_positions.tolist(), result.token_ids.tolist(), logprobs, strict=True
        )
        for row, position, token_id, logprob in entries:
            self._token(row, position, token_id, logprob)
        settled = _filled_a_block(plan)
        for row in plan.rows():
            live = self._tenants.by_row[row]
            live.in_flight -= 1
            if live.leaving is None:
                if row in settled:
                    self._blocks.settle(row)
            elif live.in_flight == 0:
                self._tenants.vacate(live)

    def _chunk(self, chunk: Chunk, scores: tuple[TokenLogprob, ...]) -> None:
        live, end = self._tenants.by_row[chunk.row], chunk.start + chunk.length
        self._table.computed[chunk.row] = end
        if live.leaving != "end" and live.generated == 0:
            total, cached = len(live.request.prompt), live.cached_tokens or 0
            new = scores[max(0, live.scored - chunk.start) :]  # a resumed prompt repeats what was delivered
            live.scored = max(live.scored, end) if scores else live.scored
            self._tenants.events.append(PromptEvent(live.request.request_id, end, total, cached, new))

    def _token(self, row: int, position: int, token_id: int, logprob: TokenLogprob | None) -> None:
        table, tenants, live = self._table, self._tenants, self._tenants.by_row[row]
        table.pending[row] -= 1
        if live.leaving == "end":  # its end was found while this step was in flight: the extra id is dropped
            table.computed[row] = min(position + 1, table.length[row])
            return
        table.computed[row] = position + 1
        cached = live.cached_tokens or 0
        if position == cached == len(live.request.prompt) - 1:  # found whole: no chunk has told of it
            tenants.events.append(PromptEvent(live.request.request_id, position + 1, position + 1, cached))
        if live.request.sampling.max_tokens == 0:
            tenants.end(live, FinishReason.LENGTH)
            return
        table.append(row, token_id)
        live.generated += 1
        self.generated_tokens += 1
        try:
            finish = self._finish_reason(live, token_id)
        except Exception as error:  # the grammar's, which is a face's: its request's end, nobody else's
            tenants.end(live, FinishReason.ERROR, f"the grammar failed: {error}")
            return
        tenants.events.append(TokenEvent(live.request.request_id, token_id, logprob, finish, cached))
        if finish is not None:
            tenants.end(live)

    def _finish_reason(self, live: Live, token_id: int) -> FinishReason | None:
        sampling, grammar = live.request.sampling, live.request.grammar
        complete = grammar is not None and grammar.advance(token_id)
        if complete or (
            live.generated >= sampling.min_tokens
            and (
                token_id in sampling.stop_token_ids
                or (token_id in live.request.end_token_ids and not sampling.ignore_eos)
            )
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if self._table.length[live.row] >= self._table.limit[live.row] else None


def _filled_a_block(plan: StepPlan) -> set[int]:
    """Rows that a step may have given a whole block: of those that decode one in 16, and all with a chunk."""
    ends = plan.decode_positions % BLOCK_SIZE == BLOCK_SIZE - 1
    return {*plan.decode_rows[ends].tolist(), *(chunk.row for chunk in plan.chunks)}
