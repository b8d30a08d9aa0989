"""Which blocks each row holds, in every KV group: matching, taking, publishing, giving back. Owns the pools and the
prefix tree and writes the table's block columns. Knows nothing of queues, budgets or mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import BLOCK_SIZE
from ..errors import InvariantError
from .blocks import BlockPool
from .prefix import Prefix, PrefixTree
from .requests import BlockCopy
from .table import RequestTable, blocks_for


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV group: layers that keep the same tokens. `window` None: all of them; w: the last w. It begins with
    `num_blocks` blocks and may grow to `most_blocks`; None: it stays as it is."""

    num_blocks: int
    window: int | None = None
    most_blocks: int | None = None

    @property
    def ceiling(self) -> int:
        """Blocks it never goes beyond."""
        return self.num_blocks if self.most_blocks is None else self.most_blocks

    def first_needed(self, position: int) -> int:
        """The first block that a query at `position` may read."""
        return 0 if self.window is None else max(0, position - self.window + 1) // BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known prefix of some ids: `num_tokens` of them, in `whole` blocks (per group, 0 where only needed
    behind a window) and, for the remaining ones, the leading slots of one `partial` block per group (to be copied).
    Every block named here carries one reference for the holder of the match."""

    num_tokens: int
    tip: Prefix
    whole: tuple[list[int], ...]
    partial: tuple[int, ...] = ()

    @property
    def partial_len(self) -> int:
        return self.num_tokens - self.tip.depth * BLOCK_SIZE


class KVAllocator:
    """The blocks of all groups, and the rows' shares in them."""

    def __init__(self, table: RequestTable, groups: Sequence[GroupSpec], *, share: bool = True) -> None:
        self.groups = tuple(groups)
        self.tree = PrefixTree(len(groups))
        self.pools = [BlockPool(spec.num_blocks, self.tree, index) for index, spec in enumerate(groups)]
        self._table = table
        self.share = share
        self._tips: dict[int, Prefix] = {}  # row -> the prefix of its published blocks
        self._most = [spec.ceiling for spec in groups]  # blocks per group that may be grown to now
        self.held_back = False  # growing is not wanted just now
        self._short = [0] * len(groups)  # empty blocks that were missing since the last change of size

    # -- room --------------------------------------------------------------------------------------------------

    def most_tokens(self) -> int:
        """The longest row the pools could ever hold."""
        full = [spec.ceiling - 1 for spec in self.groups if spec.window is None]
        return min(full) * BLOCK_SIZE if full else self._table.context_len

    def missing(self, row: int, end: int) -> list[int]:
        """Blocks per group that the row would have to take to hold positions up to `end`."""
        return [max(0, blocks_for(end) - int(have)) for have in self._table.num_blocks[:, row]]

    def peak(self, end: int, held: int, chunk_len: int) -> list[int]:
        """Most blocks per group that a row now holding `held` whole blocks takes on its way to `end`, in chunks."""
        missing = max(0, blocks_for(end) - held)
        return [
            missing if spec.window is None else min(missing, blocks_for(spec.window + chunk_len) + 2)
            for spec in self.groups
        ]

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether every group could give so many blocks now. While a group may still grow that means empty ones:
        growing comes before forgetting what is cached, and before preempting."""
        fits = True
        for index, (count, pool) in enumerate(zip(counts, self.pools, strict=True)):
            if count > pool.num_empty and pool.num_blocks < self._most[index]:
                self._short[index] = max(self._short[index], count - pool.num_empty)
                fits = False
            fits = fits and count <= pool.num_free
        return fits

    def room(self) -> int:
        """Blocks that every group could give now; see fits."""
        return min(
            pool.num_empty if pool.num_blocks < most else pool.num_free
            for most, pool in zip(self._most, self.pools, strict=True)
        )

    # -- size --------------------------------------------------------------------------------------------------

    def growth(self) -> tuple[int, ...] | None:
        """Blocks per group that would end the shortage seen since the last change of size: at least twice as many in
        a group that is short, so that growing stays rare. None: nothing is short."""
        if not any(self._short):
            return None
        return tuple(
            min(most, max(2 * pool.num_blocks, pool.num_blocks + short)) if short else pool.num_blocks
            for most, pool, short in zip(self._most, self.pools, self._short, strict=True)
        )

    def grown(self, num_blocks: Sequence[int]) -> None:
        """The arrays hold `num_blocks` blocks per group now. A group that was short and did not grow stays as it is
        until `allow_growth`: what it lacks is then found as if there were no more memory, which is so."""
        for index, (count, pool) in enumerate(zip(num_blocks, self.pools, strict=True)):
            if count > pool.num_blocks:
                pool.grow(count)
            elif self._short[index]:
                self._most[index] = pool.num_blocks
        self._short = [0] * len(self.pools)

    def allow_growth(self, allowed: bool) -> None:
        """Whether pools may grow from now on, up to their ceilings."""
        self.held_back = not allowed
        self._most = [spec.ceiling if allowed else 0 for spec in self.groups]
        if not allowed:
            self._short = [0] * len(self.pools)

    @property
    def has_grown(self) -> bool:
        """Whether a pool holds more blocks than it began with."""
        return any(pool.num_blocks > spec.num_blocks for spec, pool in zip(self.groups, self.pools, strict=True))

    def shrink(self) -> tuple[int, ...]:
        """Give up cached and empty blocks at the ends of the pools, down to the sizes they began with where no row is
        in the way; the blocks left per group."""
        return tuple(pool.shrink(spec.num_blocks) for spec, pool in zip(self.groups, self.pools, strict=True))

    # -- a row's life ------------------------------------------------------------------------------------------

    def match(self, tokens: np.ndarray, salt: bytes = b"") -> Match:
        """The longest prefix of `tokens` (int32) whose KV is held in every group, referenced for the caller."""
        root = self.tree.root(salt)
        if not self.share:
            return self._reference(Match(0, root, tuple([] for _ in self.groups)))
        nodes = self.tree.walk(tokens, salt)
        depth = self._deepest(nodes)
        tip = nodes[depth - 1] if depth else root
        num_tokens = depth * BLOCK_SIZE
        partial: tuple[int, ...] = ()
        found = self.tree.longest_partial(tip, tokens[num_tokens : num_tokens + BLOCK_SIZE])
        if found is not None:
            partial, num_tokens = tuple(found[0].blocks), num_tokens + found[1]
        whole = tuple(
            [
                node.blocks[index] if place >= spec.first_needed(num_tokens) else 0
                for place, node in enumerate(nodes[:depth])
            ]
            for index, spec in enumerate(self.groups)
        )
        return self._reference(Match(num_tokens, tip, whole, partial))

    def _deepest(self, nodes: list[Prefix]) -> int:
        """How many leading nodes can serve: in each group the blocks inside the window before that place are there."""
        runs = [[0] * (len(nodes) + 1) for _ in self.groups]  # blocks present in a row, ending before each depth
        for depth, node in enumerate(nodes, 1):
            for run, block in zip(runs, node.blocks, strict=True):
                run[depth] = run[depth - 1] + 1 if block else 0
        for depth in range(len(nodes), 0, -1):
            needs = (depth - spec.first_needed(depth * BLOCK_SIZE) for spec in self.groups)
            if all(run[depth] >= need for run, need in zip(runs, needs, strict=True)):
                return depth
        return 0

    def _reference(self, match: Match) -> Match:
        self.tree.use(match.tip)
        for index, pool in enumerate(self.pools):
            pool.share(match.whole[index])
            if match.partial:
                pool.share([match.partial[index]])
        return match

    def unmatch(self, match: Match) -> None:
        """Give back a match that no row adopted."""
        for index, pool in enumerate(self.pools):
            pool.release(match.whole[index])
            if match.partial:
                pool.release([match.partial[index]])
        self.tree.drop(match.tip)

    def adopt(self, row: int, match: Match) -> list[BlockCopy]:
        """Give a fresh row the matched blocks; its table starts with them. The returned copies fill its partial
        block; end_copies() must follow once the step that makes them is done. The caller has seen that one block
        per group is free."""
        table = self._table
        self._tips[row] = match.tip
        copies = []
        for index, blocks in enumerate(match.whole):
            table.block_ids[index][row, : len(blocks)] = blocks
            table.num_blocks[index, row] = len(blocks)
            table.first_block[index, row] = next((i for i, block in enumerate(blocks) if block), len(blocks))
        if match.partial and not self.extend(row, match.num_tokens):
            raise InvariantError("a row adopts a partial match without room for its copy")
        for index, source in enumerate(match.partial):
            destination = int(table.block_ids[index][row, len(match.whole[index])])
            copies.append(BlockCopy(index, source, destination, match.partial_len))
        table.computed[row] = table.scheduled[row] = match.num_tokens
        return copies

    def end_copies(self, copies: Sequence[BlockCopy]) -> None:
        """The copies' sources are no longer needed."""
        for copy in copies:
            self.pools[copy.group].release([copy.source])

    def extend(self, row: int, end: int) -> bool:
        """Let the row hold blocks for positions up to `end` in every group; without room False, and nothing changed."""
        missing = self.missing(row, end)
        if not self.fits(missing):
            return False
        self._table.reserve(end)
        for index, count in enumerate(missing):
            taken = self.pools[index].take(count) or []
            start = int(self._table.num_blocks[index, row])
            self._table.block_ids[index][row, start : start + count] = taken
            self._table.num_blocks[index, row] = start + count
        return True

    def settle(self, row: int) -> None:
        """After a step: publish the blocks it filled, and give back those that lie behind a window for good."""
        self._publish_whole(row)
        computed = int(self._table.computed[row])
        for index, spec in enumerate(self.groups):
            first, needed = int(self._table.first_block[index, row]), spec.first_needed(computed)
            if needed > first:
                self.pools[index].release(self._table.block_ids[index][row, first:needed].tolist())
                self._table.block_ids[index][row, first:needed] = 0
                self._table.first_block[index, row] = needed

    def _publish_whole(self, row: int) -> None:
        tip, table = self._tips[row], self._table
        whole = int(table.computed[row]) // BLOCK_SIZE if self.share else 0
        for place in range(tip.depth, whole):
            tip = self._publish(row, tip, place, table.token_ids[row, place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE])

    def _publish(self, row: int, tip: Prefix, place: int, tokens: np.ndarray) -> Prefix:
        node = self.tree.child(tip, tokens)
        self.tree.use(node)
        for index, pool in enumerate(self.pools):
            if block := int(self._table.block_ids[index][row, place]):
                pool.publish(block, node)
        self.tree.drop(tip)
        self._tips[row] = node
        return node

    def release(self, row: int, *, publish: bool = True) -> None:
        """Give back all a row holds. Its computed tail, less than a block, becomes findable as well, unless
        `publish` is off (its KV may be wrong)."""
        table = self._table
        tip, computed = self._tips[row], int(table.computed[row])
        tail = computed - tip.depth * BLOCK_SIZE
        if publish and self.share and 0 < tail < BLOCK_SIZE:
            self._publish(row, tip, tip.depth, table.token_ids[row, computed - tail : computed])
        for index, pool in enumerate(self.pools):
            pool.release(table.held(index, row).tolist())
            table.block_ids[index][row] = 0
            table.first_block[index, row] = table.num_blocks[index, row] = 0
        self.tree.drop(self._tips.pop(row))

    def forget(self) -> int:
        """Make nothing findable that no row holds; how many blocks were."""
        return sum(pool.forget_free() for pool in self.pools)

    def check(self, copies: Sequence[BlockCopy] = ()) -> None:
        """Raise InvariantError unless pools, tree and table agree. `copies`: those of steps not yet committed."""
        pins: dict[int, int] = {}
        for tip in self._tips.values():
            pins[id(tip)] = pins.get(id(tip), 0) + 1
        self.tree.check(pins)
        for index, (spec, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            holders = np.zeros(pool.num_blocks, np.int64)
            for row in np.flatnonzero(self._table.active):
                held = self._table.held(index, int(row))
                np.add.at(holders, held[held > 0], 1)
                self._check_row(index, spec, int(row))
            for copy in copies:
                if copy.group == index:
                    holders[copy.source] += 1
            pool.check(holders)

    def _check_row(self, index: int, spec: GroupSpec, row: int) -> None:
        table = self._table
        if blocks_for(int(table.scheduled[row])) > table.num_blocks[index, row]:
            raise InvariantError(f"row {row} lacks blocks for its {table.scheduled[row]} scheduled tokens")
        settled = table.scheduled[row] == table.computed[row]
        if spec.window is not None and settled:
            most = blocks_for(spec.window) + 2
            if table.num_blocks[index, row] - table.first_block[index, row] > most:
                raise InvariantError(f"row {row} holds more than {most} blocks of a {spec.window}-token window")
