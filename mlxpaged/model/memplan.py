"""The memory plan: what a model, its KV and its work may take on this machine, and whether it fits at all. Pure
arithmetic on numbers given by the caller; owns no memory and asks no device."""

from __future__ import annotations

from dataclasses import dataclass

from .kvplan import KVGroup, most, plan_blocks, row_bytes, start_blocks, wanted_blocks

LEAST_CONTEXT = 512
"""A model that could not hold even this many tokens is refused."""

_MIB, _GIB = 2**20, 2**30
_CACHE_LEAST, _CACHE_MOST = 64 * _MIB, 2048 * _MIB
_FUSED_WIDTHS = frozenset({64, 80, 128})
"""Head widths for which MLX's GPU attention makes no array of scores."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a device may give. `total` bytes of memory, `free` of them free or reclaimable; `working_set`: what the
    system recommends for a GPU that shares the memory, where it does."""

    total: int
    free: int
    working_set: int | None = None

    @property
    def reserve(self) -> int:
        """Left to everything else on the machine."""
        return min(self.total // 16, 2048 * _MIB)

    def limits(self, memory_budget: int | None) -> dict[str, int]:
        """Everything that bounds us, by the name a person knows it by."""
        found = {"the free memory": max(0, self.free - self.reserve)}
        if self.working_set is not None:
            found["the GPU's recommended working set"] = self.working_set
        if memory_budget is not None:
            found["--memory-budget"] = memory_budget
        return found


@dataclass(frozen=True, slots=True)
class Work:
    """What decides the size of a step's intermediate arrays. `widest` is the most numbers a token has inside an MLP
    (of all the experts it goes through), `item_bytes` the size of one; `fused`: attention makes no array of scores.
    `token_bytes` and `step_bytes`: once steps were measured, what each token took and what any step did; None:
    estimated."""

    hidden: int
    widest: int
    query_heads: int
    head_width: int
    vocab_size: int
    item_bytes: int
    fused: bool
    token_bytes: float | None = None
    step_bytes: int = 0

    def chunk_bytes(self, tokens: int, context: int, rows: int, layer_token_bytes: int) -> int:
        """A step of `tokens` prompt tokens over `context`, with logits of `rows`: the residual stream and a layer's
        intermediates, logits and what sampling makes of them, one layer's K and V gathered (and once more made
        contiguous), and scores where attention is not fused."""
        token = 6 * self.hidden + 3 * self.widest + 2 * self.query_heads * self.head_width
        taken = self.token_bytes if self.token_bytes is not None else token * self.item_bytes
        activations = self.step_bytes + tokens * taken
        logits = rows * self.vocab_size * (self.item_bytes + 16)
        scores = 0 if self.fused else 4 * self.query_heads * tokens * context
        return int(activations) + logits + 2 * context * layer_token_bytes + scores


def is_fused(head_width: int, on_gpu: bool) -> bool:
    """Whether MLX attends without an array of scores."""
    return on_gpu and head_width in _FUSED_WIDTHS


@dataclass(frozen=True, slots=True)
class Need:
    """What a model takes: its weights, KV per token by group, `fixed_bytes` a request whatever its length (recurrent
    state), and its work."""

    name: str
    weights_bytes: int
    groups: tuple[KVGroup, ...]
    work: Work
    context_len: int
    fixed_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """KV of one token in the layers that keep all of them and, while it is inside, in the windowed ones."""
        return sum(group.token_bytes for group in self.groups)

    @property
    def layer_token_bytes(self) -> int:
        return max((group.token_bytes // group.layers for group in self.groups), default=0)


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for. `context_len` None: the model's own, as much of it as fits. `rows`: requests at once;
    `pool_rows`: full contexts that the pool may hold at most. `share`: part of the KV budget to use (after the server
    ran out of memory, half)."""

    context_len: int | None = None
    rows: int = 32
    pool_rows: int = 32
    step_budget: int = 512
    memory_budget: int | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes and blocks. `limit_bytes` is the smallest of all limits and `limited_by` its name; weights, `chunk_bytes`
    (one step's work) and `cache_bytes` (what MLX may keep for reuse) come off it, `kv_bytes` is left. Per KV group the
    pool begins with `start_blocks` and never has more than `most_blocks`, which take `most_bytes`; it has no more of
    them because they hold `most_contexts` full contexts, or, None, because there is no room for more.
    `largest_context`: tokens of the longest request that fits, 0 for none; `context_len`: what a request may have;
    `least_context`: what must fit, and `least_bytes` the limit with which it would. `machine_bytes`: the smallest limit
    but --memory-budget."""

    name: str
    limit_bytes: int
    limited_by: str
    weights_bytes: int
    chunk_bytes: int
    cache_bytes: int
    kv_bytes: int
    token_bytes: int
    fixed_bytes: int
    most_blocks: tuple[int, ...]
    start_blocks: tuple[int, ...]
    largest_context: int
    context_len: int
    least_context: int
    least_bytes: int
    machine_bytes: int
    most_bytes: int
    most_contexts: int | None

    @property
    def fits(self) -> bool:
        return self.largest_context >= self.least_context


def plan_memory(machine: Machine, need: Need, wish: Wish) -> MemoryPlan:
    """The plan for `need` on `machine`. It is made whether the model fits or not: `refusal` says why not."""
    limited_by, limit = min(machine.limits(wish.memory_budget).items(), key=lambda item: item[1])
    context_len = min(need.context_len, wish.context_len or need.context_len)

    def chunk(context: int) -> int:
        return need.work.chunk_bytes(min(wish.step_budget, context), context, wish.rows, need.layer_token_bytes)

    def left_over(context: int) -> int:
        work = chunk(context)
        return limit - need.weights_bytes - work - cache_bytes(work)

    def left(context: int) -> int:
        """For KV beside weights and the work over `context`."""
        return int(left_over(context) * wish.share)

    def request(context: int) -> int:
        nulls = sum(group.block_bytes for group in need.groups)
        return row_bytes(need.groups, context, wish.step_budget) + nulls + need.fixed_bytes

    largest = most(lambda context: request(context) <= left(context), need.context_len)
    least = context_len if wish.context_len is not None else min(LEAST_CONTEXT, context_len)
    least_bytes = limit - left_over(least) + int(request(least) / wish.share) + 1
    planned = max(1, min(context_len, largest))
    kv_bytes = max(0, left(planned))
    ceilings = plan_blocks(
        need.groups,
        budget_bytes=kv_bytes,
        context_len=context_len,
        max_rows=wish.pool_rows,
        step_budget=wish.step_budget,
    )
    wanted = wanted_blocks(need.groups, context_len, wish.pool_rows, wish.step_budget)
    return MemoryPlan(
        need.name,
        limit,
        limited_by,
        need.weights_bytes,
        chunk(planned),
        cache_bytes(chunk(planned)),
        kv_bytes,
        need.token_bytes,
        need.fixed_bytes,
        ceilings,
        start_blocks(need.groups, ceilings, wish.step_budget),
        largest,
        context_len,
        least,
        least_bytes,
        min(machine.limits(None).values()),
        sum(count * group.block_bytes for count, group in zip(ceilings, need.groups, strict=True)),
        wish.pool_rows if ceilings == wanted else None,
    )


def cache_bytes(chunk_bytes: int) -> int:
    """What MLX may keep of freed arrays: as much as one step frees, within bounds."""
    return min(max(chunk_bytes, _CACHE_LEAST), _CACHE_MOST)


def refusal(plan: MemoryPlan) -> str | None:
    """Why the model cannot be loaded, with the numbers and what to do; None when it can."""
    if plan.fits:
        return None
    work = plan.chunk_bytes + plan.cache_bytes
    takes = f"{plan.name} does not fit: its weights take {gib(plan.weights_bytes)}, the work of a step {gib(work)}"
    allows = f"{plan.limited_by} allows {gib(plan.limit_bytes)}"
    if not plan.largest_context:
        return f"{takes}, and {allows}, so no context fits; {_way_out(plan)}"
    asked = plan.least_context == plan.context_len
    context = f"a context of {plan.least_context:,} tokens"
    return (
        f"{takes}, and {allows}; with {_kb(plan.token_bytes)} of K/V a token {context} does not fit, the largest that "
        f"does is {plan.largest_context:,}; "
        + (f"use --ctx {plan.largest_context}" if plan.largest_context >= 16 and asked else _way_out(plan))
    )


def shortfall(plan: MemoryPlan) -> str | None:
    """A line for a model that fits, but whose context is longer than the memory for its K/V; None where it is not."""
    if plan.largest_context >= plan.context_len:
        return None
    return (
        f"conversations of up to {plan.largest_context:,} tokens fit, {plan.name} was made for {plan.context_len:,}: "
        f"{plan.limited_by} leaves {gib(plan.kv_bytes)} for K/V, {plan.token_bytes / 1024:.0f} KiB a token"
    )


def _way_out(plan: MemoryPlan) -> str:
    if plan.limited_by == "--memory-budget" and plan.least_bytes <= plan.machine_bytes:
        enough = _budget(plan.least_bytes)
        return f"raise --memory-budget to {enough} or more, or give a smaller or more quantised model"
    if plan.limited_by == "the free memory":
        return "close other programs, or give a smaller or more quantised model"
    return "give a smaller or more quantised model"


def gib(count: int) -> str:
    """Bytes in the units that --memory-budget reads, small ones in MiB."""
    if count >= _GIB // 10:
        return f"{count / _GIB:.2f} GiB"
    return f"{count / _MIB:.1f} MiB" if count >= _MIB // 10 else f"{count:,} byte{'s' * (count != 1)}"


def _budget(count: int) -> str:
    """A value for --memory-budget that is enough for `count` bytes: rounded up."""
    return f"{-(-count * 100 // _GIB) / 100:.2f}GiB" if count >= _GIB // 10 else f"{-(-count // _MIB)}MiB"


def _kb(count: int) -> str:
    return f"{count / 1024:.1f} KiB"
