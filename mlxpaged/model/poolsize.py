"""Changing the size of a pool that is in use. Owns the look at the memory there is; decides nothing about blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from .kvplan import KVGroup, affordable
from .runner import ModelRunner

log = logging.getLogger(__name__)


class PoolSizer:
    """Gives a runner's pool another size, as far as memory allows. `spare` tells the bytes that may be taken now."""

    def __init__(self, runner: ModelRunner, groups: Sequence[KVGroup], spare: Callable[[], int]) -> None:
        self._runner = runner
        self._groups = groups
        self._spare = spare

    def __call__(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Ask for `wanted` blocks per group; the blocks that the pool holds then. No step may be in flight."""
        pool = self._runner.pool
        sizes = affordable(pool.num_blocks, wanted, self._groups, self._spare())
        if sizes != pool.num_blocks:
            try:
                self._runner.resize(sizes)
            except (RuntimeError, ValueError, MemoryError) as error:  # what MLX raises when the device gives no memory
                log.warning("the KV pool stays at %s blocks: %s", pool.num_blocks, error)
        return pool.num_blocks
