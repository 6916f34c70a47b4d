"""The blocks of the KV cache: allocation, and a prefix cache that shares computed blocks between sequences.

A block holds the keys and values of BLOCK_TOKENS tokens. A sequence leases blocks; computed blocks are shared with
later sequences through a radix tree, in which a node is one block and the path from the root is its tokens. There
is one tree per *space* (tenant and version of the weights), and lookups never cross spaces.

    open(space, tokens)   lease the longest cached prefix; the rest is to be computed
    extend(lease, n)      room for n tokens in total, or False
    share(lease, tokens)  these tokens are computed: other sequences may use them
    close(lease)          return all blocks; shared ones stay cached until room is needed

A prefix that ends inside a block is copied: `Lease.copy` names the source block, so that typing one more character
computes the tokens of that character and not a whole block. Leased blocks are never evicted; of the others the least
recently used leaf is evicted first. Nothing here blocks; each call costs O(tokens). Independent of torch.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

__all__ = ["BLOCK_TOKENS", "BlockPool", "Lease"]

BLOCK_TOKENS = 16


class _Node:
    """One cached block: its tokens, and its children by their first token."""

    __slots__ = ("block", "children", "is_removed", "leases", "parent", "tokens", "used_at")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...], block: int) -> None:
        self.parent, self.tokens, self.block = parent, tokens, block
        self.children: dict[int, list[_Node]] = {}
        self.leases = 0
        self.used_at = 0
        self.is_removed = False

    def find(self, tokens: tuple[int, ...]) -> _Node | None:
        """The child with exactly these tokens."""
        for child in self.children.get(tokens[0], ()):  # runs a hundred times for every prompt: no generator
            if child.tokens == tokens:
                return child
        return None

    def nearest(self, tokens: Sequence[int]) -> tuple[_Node | None, int]:
        """The child with the longest common prefix with `tokens`, and its length."""
        best, longest = None, 0
        for child in self.children.get(tokens[0], ()) if tokens else ():
            length = _common(child.tokens, tokens)
            if length > longest:
                best, longest = child, length
        return best, longest


@dataclass(eq=False)
class Lease:
    """The blocks of one sequence, in the order of its tokens."""

    root: _Node
    blocks: array[int] = field(default_factory=lambda: array("i"))
    """An array, because numpy copies one into the inputs of a step three times as fast as a list."""
    nodes: list[_Node] = field(default_factory=list)
    """The leased nodes of the tree: blocks[: len(nodes)] are theirs, the rest belongs to this sequence alone."""
    num_cached: int = 0
    """Tokens whose keys and values are cached."""
    copy: tuple[int, int] | None = None
    """(source block, target block) to copy before the first step of the sequence."""


class BlockPool:
    def __init__(self, num_blocks: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._free = list(range(num_blocks - 1, -1, -1))
        self._roots: dict[Hashable, _Node] = {}
        self._idle = 0  # cached blocks without a lease
        self._leaves: list[tuple[int, int, _Node]] = []  # a heap; may contain nodes that are no longer idle leaves
        self._clock = itertools.count(1)
        self._serial = itertools.count()

    @property
    def num_available(self) -> int:
        """Free blocks, and cached ones that can be evicted."""
        return len(self._free) + self._idle

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def open(self, space: Hashable, tokens: Sequence[int]) -> Lease:
        """Lease the cached prefix of these tokens, without the last one, which is computed again for its logits."""
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
        for leased in nodes:
            self._lease(leased)
        lease.blocks = array("i", [leased.block for leased in nodes])
        lease.num_cached = len(nodes) * size
        near, length = node.nearest(tokens[lease.num_cached : min(usable, lease.num_cached + size)])
        if near is not None:
            self._lease(near)  # so that `extend` does not evict it
            if self.extend(lease, lease.num_cached + length):
                lease.copy = (near.block, lease.blocks[-1])
                lease.num_cached += length
            self._release(near)
        return lease

    def extend(self, lease: Lease, num_tokens: int) -> bool:
        """Make room for `num_tokens` in total; returns False and changes nothing if there is none."""
        missing = -(-num_tokens // self.block_tokens) - len(lease.blocks)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            lease.blocks.append(self._take())
        return True

    def share(self, lease: Lease, tokens: Sequence[int]) -> None:
        """The blocks of the lease hold the keys and values of these tokens: add the full blocks to the tree.

        Where another sequence was first with the same tokens, the lease takes its block and frees its own.
        """
        size = self.block_tokens
        if lease.root.is_removed:
            return
        for index in range(len(lease.nodes), len(tokens) // size):
            part = tuple(tokens[index * size : (index + 1) * size])
            parent = lease.nodes[-1] if lease.nodes else lease.root
            node = parent.find(part)
            if node is None:
                node = self._insert(parent, part, lease.blocks[index])
            elif node.block != lease.blocks[index]:
                self._free.append(lease.blocks[index])
                lease.blocks[index] = node.block
            self._lease(node)
            lease.nodes.append(node)

    def close(self, lease: Lease, tokens: Sequence[int] = ()) -> None:
        """Return every block. `tokens` are those that were computed: they stay cached, also a partial block."""
        self.share(lease, tokens)
        num_nodes = len(lease.nodes)
        tail = tuple(tokens[num_nodes * self.block_tokens :])
        parent = lease.nodes[-1] if lease.nodes else lease.root
        spare = lease.blocks[num_nodes:]
        if tail and spare and not lease.root.is_removed and parent.nearest(tail)[1] < len(tail):
            self._insert(parent, tail, spare.pop(0))
        self._free.extend(spare)
        for node in reversed(lease.nodes):
            self._release(node)
        lease.blocks, lease.nodes = array("i"), []

    def reset(self) -> None:
        """Clear the prefix cache; leased blocks stay with their leases, unshared."""
        roots, self._roots = list(self._roots.values()), {}
        self._leaves.clear()
        for root in roots:
            root.is_removed = True
            for node in _below(root):
                node.is_removed = True
                if node.leases == 0:
                    self._free.append(node.block)
        self._idle = 0

    # --- the tree ---

    def _insert(self, parent: _Node, tokens: tuple[int, ...], block: int) -> _Node:
        siblings = parent.children.setdefault(tokens[0], [])
        for other in list(siblings):  # a shorter prefix of this node
            if len(other.tokens) < len(tokens) and other.leases == 0 and other.tokens == tokens[: len(other.tokens)]:
                self._remove_leaf(other)
        node = _Node(parent, tokens, block)
        parent.children.setdefault(tokens[0], []).append(node)
        self._idle += 1
        self._touch(node)
        return node

    def _lease(self, node: _Node) -> None:
        self._idle -= node.leases == 0
        node.leases += 1

    def _release(self, node: _Node) -> None:
        node.leases -= 1
        if node.leases == 0:
            if node.is_removed:  # while it was leased
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
        if len(self._leaves) > 4 * self.num_blocks + 64:  # mostly outdated entries
            self._leaves = [entry for entry in self._leaves if _can_evict(*entry)]
            heapq.heapify(self._leaves)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        while True:
            entry = heapq.heappop(self._leaves)
            if _can_evict(*entry):
                self._remove_leaf(entry[2])
                return self._free.pop()

    def _remove_leaf(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        siblings = parent.children[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del parent.children[node.tokens[0]]
        node.parent, node.is_removed = None, True
        self._idle -= 1
        self._free.append(node.block)
        if not parent.children and parent.leases == 0 and parent.parent is not None:
            self._offer(parent)


def _can_evict(used_at: int, _: int, node: _Node) -> bool:
    return node.used_at == used_at and node.leases == 0 and not node.children and not node.is_removed


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _below(node: _Node) -> list[_Node]:
    found = [child for children in node.children.values() for child in children]
    for child in found:
        found.extend(grandchild for children in child.children.values() for grandchild in children)
    return found
