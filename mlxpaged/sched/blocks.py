"""Which blocks of one KV group are held, how often, and which free ones are still findable. Owns every block id of the
group. Knows nothing of mlx, rows or requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from ..errors import InvariantError
from .prefix import Prefix, PrefixTree

SHARED, CACHED, FREE = -1, -2, -3


class BlockPool:
    """`num_blocks` blocks, block 0 being the null block that is never given out.

    A block is held (one reference per holder) or free. Free blocks form one list in the order of reuse: blocks
    whose content nobody could find come first, then findable ones, least recently released first. A findable block
    keeps its prefix until it is taken for something else. After the free list of vLLM's block pool.
    """

    def __init__(self, num_blocks: int, tree: PrefixTree, group: int = 0) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs 2 blocks or more, the null block included; got {num_blocks}")
        self.num_blocks = num_blocks
        self.evictions = 0
        self._tree = tree
        self._group = group
        self._references = np.zeros(num_blocks, np.int32)
        self._references[0] = 1
        self._prefixes: list[Prefix | None] = [None] * num_blocks
        self._findable = np.zeros(num_blocks, bool)  # has a prefix
        self._num_cached = 0  # free and findable
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that take() could give, findable ones included."""
        return len(self._free)

    @property
    def num_empty(self) -> int:
        """Free blocks that hold nothing findable: taking them loses nothing."""
        return len(self._free) - self._num_cached

    def counts(self) -> dict[str, int]:
        """Blocks by state: used (held), shared (held twice or more), cached (free, findable), free (the rest)."""
        held = self._references[1:]
        return {
            "used": int(np.count_nonzero(held)),
            "shared": int(np.count_nonzero(held > 1)),
            "cached": self._num_cached,
            "free": self.num_empty,
        }

    def marks(self) -> np.ndarray:
        """int64 [num_blocks]: what each block is, as SHARED, CACHED, FREE, or 0 for one holder."""
        lone = np.where(self._findable, CACHED, FREE)
        return np.where(self._references == 0, lone, np.where(self._references > 1, SHARED, 0)).astype(np.int64)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, their old content forgotten; None when there is no room."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._references[block] = 1
            if self._prefixes[block] is not None:
                self.evictions += 1
                self._forget_free(block)
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; null blocks are passed over."""
        for block in block_ids:
            if block:
                if self._references[block] == 0:
                    del self._free[block]
                    self._num_cached -= int(self._findable[block])
                self._references[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block of a row, given first to last; the tail becomes reusable first."""
        for block in reversed(block_ids):
            if not block:
                continue
            if self._references[block] <= 0:
                raise InvariantError(f"block {block} of group {self._group} is released but nobody holds it")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                self._num_cached += int(self._findable[block])
                if self._prefixes[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block_id: int, prefix: Prefix) -> None:
        """Make a held block findable as the end of `prefix`. A second block of equal content stays unfindable, so
        that tables are only ever appended to."""
        if prefix.blocks[self._group] == 0 and self._prefixes[block_id] is None:
            prefix.blocks[self._group] = block_id
            self._prefixes[block_id] = prefix
            self._findable[block_id] = True
            self._tree.use(prefix)

    def grow(self, num_blocks: int) -> None:
        """Raise the number of blocks to `num_blocks`; the new ones are free and empty."""
        added = num_blocks - self.num_blocks
        self._references = np.concatenate([self._references, np.zeros(added, np.int32)])
        self._prefixes += [None] * added
        self._findable = np.concatenate([self._findable, np.zeros(added, bool)])
        for block in range(num_blocks - 1, self.num_blocks - 1, -1):
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        self.num_blocks = num_blocks

    def shrink(self, num_blocks: int) -> int:
        """Give up free blocks at the end, findable ones too, until `num_blocks` are left or the last one is held; how
        many are left."""
        left = max(num_blocks, int(np.flatnonzero(self._references)[-1]) + 1, 2)
        for block in range(left, self.num_blocks):
            del self._free[block]
            if self._prefixes[block] is not None:
                self._forget_free(block)
        if left < self.num_blocks:
            self._references, self._findable = self._references[:left].copy(), self._findable[:left].copy()
            del self._prefixes[left:]
            self.num_blocks = left
        return self.num_blocks

    def forget_free(self) -> int:
        """Make every free block unfindable (its KV may be wrong, or memory is wanted); how many were findable."""
        cached = [block for block in self._free if self._prefixes[block] is not None]
        for block in cached:
            self._forget_free(block)
        return len(cached)

    def _forget_free(self, block: int) -> None:
        """A block without a holder is findable no more."""
        self._num_cached -= 1
        prefix = self._prefixes[block]
        assert prefix is not None
        self._prefixes[block] = None
        self._findable[block] = False
        prefix.blocks[self._group] = 0
        self._tree.drop(prefix)

    def check(self, holders: np.ndarray) -> None:
        """Raise InvariantError unless references equal `holders` (int [num_blocks], counted from outside), every
        block is either held or free, and each prefix and its block name each other."""
        wrong = np.flatnonzero(self._references[1:] != holders[1:]) + 1
        if len(wrong):
            block = int(wrong[0])
            raise InvariantError(
                f"block {block} of group {self._group} has {self._references[block]} references, "
                f"{holders[block]} holders"
            )
        free = np.zeros(self.num_blocks, bool)
        free[list(self._free)] = True
        if np.any(free == (self._references > 0)):
            raise InvariantError(f"group {self._group}: a block is both held and free, or neither")
        cached = int(np.count_nonzero(self._findable[1:] & (self._references[1:] == 0)))
        if cached != self._num_cached:
            raise InvariantError(f"group {self._group} counts {self._num_cached} cached blocks, has {cached}")
        for block, prefix in enumerate(self._prefixes):
            if self._findable[block] != (prefix is not None):
                raise InvariantError(f"block {block} of group {self._group} is wrongly marked as findable or not")
            if prefix is not None and prefix.blocks[self._group] != block:
                raise InvariantError(f"block {block} of group {self._group} is not the one its prefix names")
