"""How many bytes KV takes and how many blocks fit a budget. Pure arithmetic on numbers given by the caller; owns no
memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config import BLOCK_SIZE
from ..sched.table import blocks_for

START_TOKENS = 4096
"""A pool begins with room for so many tokens, and grows from there."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How one number of K or V is stored: in `bits`, and where `group` numbers share a scale and a bias, those in 16
    bits each."""

    bits: int
    group: int | None = None

    def vector_bytes(self, width: int) -> int:
        """Bytes of one head's key or value of `width` numbers."""
        scales = 4 * -(-width // self.group) if self.group else 0
        return -(-width * self.bits // 8) + scales


KV_FORMATS = {
    "float32": KVFormat(32),
    "float16": KVFormat(16),
    "bfloat16": KVFormat(16),
    "int8": KVFormat(8, group=64),
    "int4": KVFormat(4, group=64),
}


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the same tokens: what one token costs over all of them, how many they are, and the window (None:
    they keep every token)."""

    token_bytes: int
    layers: int
    window: int | None = None

    @classmethod
    def of(
        cls, layers: int, heads: int, k_width: int, v_width: int, form: KVFormat, window: int | None = None
    ) -> KVGroup:
        """Layers of `heads` keys and values each. Latent attention is one head of the latent's and the rotated part's
        width together, without values."""
        return cls(layers * heads * (form.vector_bytes(k_width) + form.vector_bytes(v_width)), layers, window)

    @property
    def block_bytes(self) -> int:
        return BLOCK_SIZE * self.token_bytes

    def row_blocks(self, tokens: int, step_budget: int) -> int:
        """The most blocks that a request of `tokens` holds at any time."""
        blocks = blocks_for(tokens)
        return blocks if self.window is None else min(blocks, blocks_for(self.window + step_budget) + 2)


def row_bytes(groups: Sequence[KVGroup], tokens: int, step_budget: int) -> int:
    """The most KV that one request of `tokens` holds at any time."""
    return sum(group.row_blocks(tokens, step_budget) * group.block_bytes for group in groups)


def wanted_blocks(groups: Sequence[KVGroup], context_len: int, max_rows: int, step_budget: int) -> tuple[int, ...]:
    """Blocks of each KV group (the null block included) that `max_rows` full contexts could use. A windowed group never
    needs more than its rows' windows and one chunk each; twice that lets prefixes stay findable."""
    contexts = [min(blocks_for(context_len), 2 * group.row_blocks(context_len, step_budget)) for group in groups]
    return tuple(max_rows * blocks + 1 for blocks in contexts)


def plan_blocks(
    groups: Sequence[KVGroup], *, budget_bytes: int, context_len: int, max_rows: int, step_budget: int
) -> tuple[int, ...]:
    """Blocks of each KV group (the null block included) within `budget_bytes`.

    No group gets more than `wanted_blocks`. The longest request that fits at all comes first; what is left is shared
    out in proportion to what each group could still use.
    """
    wanted = wanted_blocks(groups, context_len, max_rows, step_budget)

    def one_row(tokens: int) -> list[int]:
        return [group.row_blocks(tokens, step_budget) + 1 for group in groups]

    def cost(counts: Sequence[int]) -> int:
        return sum(count * group.block_bytes for count, group in zip(counts, groups, strict=True))

    longest = most(lambda blocks: cost(one_row(blocks * BLOCK_SIZE)) <= budget_bytes, blocks_for(context_len))
    first = one_row(max(longest, 1) * BLOCK_SIZE)
    rest = cost(wanted) - cost(first)
    share = min(1.0, max(0, budget_bytes - cost(first)) / rest) if rest > 0 else 1.0
    return tuple(begun + int((count - begun) * share) for begun, count in zip(first, wanted, strict=True))


def start_blocks(groups: Sequence[KVGroup], ceilings: Sequence[int], step_budget: int) -> tuple[int, ...]:
    """Blocks each group begins with: room for START_TOKENS, never less than a window needs to move at all."""
    tokens = max(START_TOKENS, 2 * step_budget)
    return tuple(
        min(ceiling, blocks_for(tokens) + 1, 4 * group.row_blocks(tokens, step_budget) + 1)
        for group, ceiling in zip(groups, ceilings, strict=True)
    )


def most(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that `holds`, which must hold below any number it holds for; 0 when none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def affordable(
    now: Sequence[int], wanted: Sequence[int], groups: Sequence[KVGroup], spare_bytes: int
) -> tuple[int, ...]:
    """How far each group may go from `now` towards `wanted` blocks when `spare_bytes` can be taken. While it grows,
    one layer of it is held twice. Shrinking needs no permission."""
    grows = [max(0, goal - count) for count, goal in zip(now, wanted, strict=True)]
    twice = max(
        (
            count * group.block_bytes // group.layers
            for count, group, more in zip(now, groups, grows, strict=True)
            if more
        ),
        default=0,
    )
    cost = sum(more * group.block_bytes for more, group in zip(grows, groups, strict=True))
    share = 1.0 if cost + twice <= spare_bytes else max(0, spare_bytes - twice) / cost
    return tuple(
        count + int(more * share) if more else goal for count, goal, more in zip(now, wanted, grows, strict=True)
    )
