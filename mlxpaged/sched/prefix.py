"""Which token prefixes are known, each as one interned identity. Owns the tree of prefixes; knows block ids only as
numbers to remember, and nothing of rows, requests or mlx."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from ..config import BLOCK_SIZE
from ..errors import InvariantError

_YOUNGEST = 32
"""Children looked at for a partly matching block: chats that share a long prompt may be many, a scan must not be."""


class Prefix:
    """All tokens from position 0 to the end of one block.

    A node's place in the tree is its chained content hash: the dictionary of a parent hashes the 16 ids of a block
    and then compares them, so equal blocks behind different parents are different nodes and a hash collision costs
    a comparison, never wrong KV. A node lives while something uses it: a block, a child, or a row that stands on it.
    """

    __slots__ = ("blocks", "children", "depth", "parent", "tokens", "uses")

    def __init__(self, parent: Prefix | None, tokens: bytes, num_groups: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.depth: int = 0 if parent is None else parent.depth + 1  # whole blocks up to and including this one
        self.blocks = [0] * num_groups  # per KV group: the block that holds this part's KV, 0 for none
        self.children: dict[bytes, Prefix] = {}
        self.uses = 0


class PrefixTree:
    """The interned prefixes, one root for each salt."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._roots: dict[bytes, Prefix] = {}

    def root(self, salt: bytes = b"") -> Prefix:
        """The empty prefix of one salt; KV never crosses from one root to another."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Prefix(None, salt, self._num_groups)
        return node

    def walk(self, tokens: np.ndarray, salt: bytes = b"") -> list[Prefix]:
        """The nodes known for the whole blocks of `tokens` (int32), first block first. Groups may lack their block."""
        node, nodes = self.root(salt), []
        raw = np.ascontiguousarray(tokens, np.int32).tobytes()
        step = BLOCK_SIZE * 4
        for start in range(0, len(raw) - step + 1, step):
            child = node.children.get(raw[start : start + step])
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def child(self, parent: Prefix, tokens: np.ndarray) -> Prefix:
        """The node of `tokens` (at most one block) behind `parent`, made when new. The caller must use it at once."""
        key = np.ascontiguousarray(tokens, np.int32).tobytes()
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Prefix(parent, key, self._num_groups)
            parent.uses += 1
        return node

    def longest_partial(self, parent: Prefix, tokens: np.ndarray) -> tuple[Prefix, int] | None:
        """The child, present in every group, that shares most leading ids with `tokens`, and how many (1 or more)."""
        best: tuple[Prefix, int] | None = None
        for child in islice(reversed(parent.children.values()), _YOUNGEST):
            known = np.frombuffer(child.tokens, np.int32)
            shared = min(len(known), len(tokens))
            differs = np.flatnonzero(known[:shared] != tokens[:shared])
            shared = int(differs[0]) if len(differs) else shared
            if shared > (best[1] if best else 0) and all(child.blocks):
                best = (child, shared)
        return best

    def use(self, node: Prefix) -> None:
        """Keep `node` until a matching drop()."""
        node.uses += 1

    def drop(self, node: Prefix) -> None:
        """End one use; nodes nothing uses any more leave the tree, parents included."""
        node.uses -= 1
        while node.uses == 0 and node.parent is not None:
            parent = node.parent
            del parent.children[node.tokens]
            parent.uses -= 1
            node = parent
        if node.uses == 0 and node.parent is None and node.tokens:
            self._roots.pop(node.tokens, None)  # the unsalted root stays

    def nodes(self) -> Iterator[Prefix]:
        """Every node but the roots, in no particular order."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def check(self, pins: dict[int, int]) -> None:
        """Raise InvariantError unless each node's uses are its blocks, children and pins (`id(node)` -> rows)."""
        for node in self.nodes():
            expected = sum(1 for block in node.blocks if block) + len(node.children) + pins.get(id(node), 0)
            if node.uses != expected or node.uses == 0:
                raise InvariantError(f"prefix of depth {node.depth} counts {node.uses} uses, has {expected}")
