"""Blocks of the key-value cache: who holds which, and which prefix of tokens each one remembers.

A block has room for the keys and values of BLOCK_TOKENS tokens. A row (one request on its way) leases blocks; what it
has computed is shared with later rows through a tree in which every node is one block and the path from the root
spells the tokens. Trees are apart by *space* (tenant and version of the weights): no lookup ever crosses from one to
another.

    open(space, tokens)   the longest remembered prefix, held; the rest is to be computed
    extend(lease, n)      room for n tokens in total, or nothing
    share(lease, tokens)  these tokens are computed: others may use them
    close(lease)          give everything back at once; what was shared stays until room is needed

A prefix that ends inside a block is worth a copy: `Lease.copy` names the block to copy from, so that typing one more
character costs the tokens of that character and not of a whole block. Held blocks never go; of the others the least
recently used leaf goes first. Nothing here blocks, and nothing here knows tensors: cost is O(tokens) per call.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

__all__ = ["BLOCK_TOKENS", "BlockPool", "Lease"]

BLOCK_TOKENS = 16


class _Node:
    """One remembered block: its tokens, and what may follow them, by the first token."""

    __slots__ = ("block", "children", "holders", "is_forgotten", "parent", "tokens", "used_at")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...], block: int) -> None:
        self.parent, self.tokens, self.block = parent, tokens, block
        self.children: dict[int, list[_Node]] = {}
        self.holders = 0
        self.used_at = 0
        self.is_forgotten = False

    def find(self, tokens: tuple[int, ...]) -> _Node | None:
        """The child that spells exactly these tokens."""
        for child in self.children.get(tokens[0], ()):  # a hundred times for every prompt: no generator
            if child.tokens == tokens:
                return child
        return None

    def nearest(self, tokens: Sequence[int]) -> tuple[_Node | None, int]:
        """The child that agrees with the beginning of `tokens` for longest, and for how long."""
        best, longest = None, 0
        for child in self.children.get(tokens[0], ()) if tokens else ():
            length = _common(child.tokens, tokens)
            if length > longest:
                best, longest = child, length
        return best, longest


@dataclass(eq=False)
class Lease:
    """The blocks of one row, in the order of its tokens."""

    root: _Node
    blocks: list[int] = field(default_factory=list)
    nodes: list[_Node] = field(default_factory=list)
    """The held nodes: blocks[: len(nodes)] are theirs, the rest belongs to this row alone."""
    num_cached: int = 0
    """Tokens whose keys and values were found."""
    copy: tuple[int, int] | None = None
    """(from block, to block): to be copied before the row's first step."""


class BlockPool:
    def __init__(self, num_blocks: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._free = list(range(num_blocks - 1, -1, -1))
        self._roots: dict[Hashable, _Node] = {}
        self._idle = 0  # remembered blocks that nobody holds
        self._leaves: list[tuple[int, int, _Node]] = []  # a heap; may name nodes that are no longer idle leaves
        self._clock = itertools.count(1)
        self._serial = itertools.count()

    @property
    def num_available(self) -> int:
        """Blocks that could be had now: free ones, and remembered ones that nobody holds."""
        return len(self._free) + self._idle

    @property
    def num_cached_blocks(self) -> int:
        return sum(_count(root) for root in self._roots.values())

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def open(self, space: Hashable, tokens: Sequence[int]) -> Lease:
        """Hold what is remembered of these tokens, all but the last one: that is computed again for its scores."""
        root = self._roots.setdefault(space, _Node(None, (), -1))
        lease = Lease(root)
        size, usable = self.block_tokens, len(tokens) - 1
        node, nodes = root, lease.nodes
        for start in range(0, usable - size + 1, size):
            child = node.find(tuple(tokens[start : start + size]))
            if child is None:
                break
            nodes.append(child)
            node = child
        for held in nodes:
            self._hold(held)
        lease.blocks = [held.block for held in nodes]
        lease.num_cached = len(nodes) * size
        near, length = node.nearest(tokens[lease.num_cached : min(usable, lease.num_cached + size)])
        if near is not None:
            self._hold(near)  # so that making room does not take it
            if self.extend(lease, lease.num_cached + length):
                lease.copy = (near.block, lease.blocks[-1])
                lease.num_cached += length
            self._drop(near)
        return lease

    def extend(self, lease: Lease, num_tokens: int) -> bool:
        """Room for so many tokens in total; False, and nothing changed, where there is none."""
        missing = -(-num_tokens // self.block_tokens) - len(lease.blocks)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            lease.blocks.append(self._take())
        return True

    def share(self, lease: Lease, tokens: Sequence[int]) -> None:
        """The lease's blocks hold the keys and values of these tokens: remember the full blocks.

        Where another row was first with the same tokens, its block is used and ours goes back.
        """
        size = self.block_tokens
        if lease.root.is_forgotten:
            return
        for index in range(len(lease.nodes), len(tokens) // size):
            part = tuple(tokens[index * size : (index + 1) * size])
            parent = lease.nodes[-1] if lease.nodes else lease.root
            node = parent.find(part)
            if node is None:
                node = self._remember(parent, part, lease.blocks[index])
            elif node.block != lease.blocks[index]:
                self._free.append(lease.blocks[index])
                lease.blocks[index] = node.block
            self._hold(node)
            lease.nodes.append(node)

    def close(self, lease: Lease, tokens: Sequence[int] = ()) -> None:
        """Give back every block. `tokens` are those that were computed: they stay remembered, a part block too."""
        self.share(lease, tokens)
        num_nodes = len(lease.nodes)
        tail = tuple(tokens[num_nodes * self.block_tokens :])
        parent = lease.nodes[-1] if lease.nodes else lease.root
        spare = lease.blocks[num_nodes:]
        if tail and spare and not lease.root.is_forgotten and parent.nearest(tail)[1] < len(tail):
            self._remember(parent, tail, spare.pop(0))
        self._free.extend(spare)
        for node in reversed(lease.nodes):
            self._drop(node)
        lease.blocks, lease.nodes = [], []

    def reset(self) -> None:
        """Nothing is remembered any more; blocks that are held stay with their holders, unshared."""
        roots, self._roots = list(self._roots.values()), {}
        self._leaves.clear()
        for root in roots:
            root.is_forgotten = True
            for node in _below(root):
                node.is_forgotten = True
                if node.holders == 0:
                    self._free.append(node.block)
        self._idle = 0

    # --- inside ---

    def _remember(self, parent: _Node, tokens: tuple[int, ...], block: int) -> _Node:
        siblings = parent.children.setdefault(tokens[0], [])
        for other in list(siblings):  # what this one says too, and says more of
            if len(other.tokens) < len(tokens) and other.holders == 0 and other.tokens == tokens[: len(other.tokens)]:
                self._forget_leaf(other)
        node = _Node(parent, tokens, block)
        parent.children.setdefault(tokens[0], []).append(node)
        self._idle += 1
        self._touch(node)
        return node

    def _hold(self, node: _Node) -> None:
        self._idle -= node.holders == 0
        node.holders += 1

    def _drop(self, node: _Node) -> None:
        node.holders -= 1
        if node.holders == 0:
            if node.is_forgotten:  # while it was held
                self._free.append(node.block)
            else:
                self._idle += 1
                self._touch(node)

    def _touch(self, node: _Node) -> None:
        node.used_at = next(self._clock)
        if not node.children:
            self._offer(node)

    def _offer(self, leaf: _Node) -> None:
        heapq.heappush(self._leaves, (leaf.used_at, next(self._serial), leaf))
        if len(self._leaves) > 4 * self.num_blocks + 64:  # mostly entries that no longer hold
            self._leaves = [entry for entry in self._leaves if _may_go(*entry)]
            heapq.heapify(self._leaves)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        while True:
            entry = heapq.heappop(self._leaves)
            if _may_go(*entry):
                self._forget_leaf(entry[2])
                return self._free.pop()

    def _forget_leaf(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        siblings = parent.children[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del parent.children[node.tokens[0]]
        node.parent, node.is_forgotten = None, True
        self._idle -= 1
        self._free.append(node.block)
        if not parent.children and parent.holders == 0 and parent.parent is not None:
            self._offer(parent)


def _may_go(used_at: int, _: int, node: _Node) -> bool:
    return node.used_at == used_at and node.holders == 0 and not node.children and not node.is_forgotten


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


def _below(node: _Node) -> list[_Node]:
    found = [child for children in node.children.values() for child in children]
    for child in found:
        found.extend(grandchild for children in child.children.values() for grandchild in children)
    return found


def _count(root: _Node) -> int:
    return len(_below(root))
