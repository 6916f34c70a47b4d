"""Chosen options to ranks: longest processing time first (LPT) and Karmarkar-Karp, under memory limits.

Pieces on all ranks are placed first, then those on whole nodes, then those on single ranks. LPT puts the longest
piece on the rank with the least time that has memory for it: n log P steps for n pieces on P ranks. Karmarkar-Karp
(the largest differencing method) merges the two partial assignments that differ most, n P log P steps; it does not
see memory, so an assignment over a limit is refused.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lakh.planner.embedding.options import ShardingLimits, ShardingOption
from lakh.spec.embedding import MemoryTier

__all__ = ["Placement", "best_node", "karmarkar_karp", "place_differencing", "place_longest_first"]


@dataclass(slots=True)
class Placement:
    """One option per table, and the rank (or node) of each slice."""

    limits: ShardingLimits
    loads: NDArray[np.float64]
    used: dict[MemoryTier, NDArray[np.float64]]
    chosen: list[ShardingOption]
    homes: list[tuple[int, ...]] = field(default_factory=list)
    """By table: the rank of each slice, its node for reach "node", empty for reach "all"."""

    @classmethod
    def empty(cls, limits: ShardingLimits, tables: int, like: Sequence[ShardingOption] = ()) -> Placement:
        used: dict[MemoryTier, NDArray[np.float64]] = {tier: np.zeros(limits.ranks) for tier in limits.tier_bytes}
        return cls(limits, np.zeros(limits.ranks), used, list(like), [()] * tables)

    @property
    def bottleneck_ms(self) -> float:
        return float(self.loads.max())

    def put(self, table: int, option: ShardingOption, homes: tuple[int, ...], sign: int = 1) -> None:
        """Add a table to its ranks, or take it away with sign -1."""
        node = self.limits.node_size
        used = self.used[option.tier]
        if option.reach == "all":
            self.loads += sign * option.slice_ms[0]
            used += sign * option.slice_bytes[0]
        for home, time_ms, size in zip(homes, option.slice_ms, option.slice_bytes, strict=False):
            where = home if option.reach == "rank" else slice(home * node, (home + 1) * node)
            self.loads[where] += sign * time_ms
            used[where] += sign * size
        self.homes[table] = homes if sign > 0 else ()
        if sign > 0:
            self.chosen[table] = option

    def fits(self) -> bool:
        return all(bool((self.used[tier] <= cap).all()) for tier, cap in self.limits.tier_bytes.items())


def place_longest_first(
    chosen: Sequence[ShardingOption], limits: ShardingLimits, *, largest_first: bool = False
) -> Placement | None:
    """LPT (or by size, for tight memory); None if a piece finds no rank with memory."""
    placement = Placement.empty(limits, len(chosen), chosen)
    _place_shared(placement, [t for t, option in enumerate(chosen) if option.reach == "all"])
    on_nodes = [t for t, option in enumerate(chosen) if option.reach == "node"]
    for table in sorted(on_nodes, key=lambda t: -chosen[t].slice_ms[0]):
        node = best_node(placement, chosen[table])
        if node is None:
            return None
        placement.put(table, chosen[table], (node,))
    if not placement.fits():
        return None
    pieces = _rank_pieces(chosen)
    if largest_first:
        pieces.sort(key=lambda piece: -chosen[piece[1]].slice_bytes[piece[2]])
    heap = [(float(load), rank) for rank, load in enumerate(placement.loads)]
    heapq.heapify(heap)
    free = {tier: list(cap - placement.used[tier]) for tier, cap in limits.tier_bytes.items()}
    homes: dict[int, dict[int, int]] = {}
    for time_ms, table, index in pieces:
        option = chosen[table]
        size, free_bytes = option.slice_bytes[index], free[option.tier]
        passed = []
        while heap and free_bytes[heap[0][1]] < size:
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        load, rank = heapq.heappop(heap)
        heapq.heappush(heap, (load + time_ms, rank))
        for entry in passed:
            heapq.heappush(heap, entry)
        free_bytes[rank] -= size
        homes.setdefault(table, {})[index] = rank
    for table, by_index in homes.items():
        placement.put(table, chosen[table], tuple(by_index[index] for index in range(len(by_index))))
    return placement


def place_differencing(chosen: Sequence[ShardingOption], limits: ShardingLimits) -> Placement | None:
    """Karmarkar-Karp; None if pieces on whole nodes make ranks unequal or if the result does not fit into memory."""
    if any(option.reach == "node" for option in chosen):
        return None
    placement = Placement.empty(limits, len(chosen), chosen)
    _place_shared(placement, [t for t, option in enumerate(chosen) if option.reach == "all"])
    pieces = _rank_pieces(chosen)
    homes: dict[int, dict[int, int]] = {}
    for rank, members in enumerate(karmarkar_karp([piece[0] for piece in pieces], limits.ranks)):
        for member in members:
            _, table, index = pieces[member]
            homes.setdefault(table, {})[index] = rank
    for table, by_index in homes.items():
        placement.put(table, chosen[table], tuple(by_index[index] for index in range(len(by_index))))
    return placement if placement.fits() else None


def karmarkar_karp(numbers: Sequence[float], parts: int) -> list[list[int]]:
    """Indices of `numbers` in `parts` groups of similar sums."""
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for index, number in enumerate(numbers):
        sums: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(parts - 1)]
        heap.append((-number, index, [(number, [index]), *sums]))
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        left, right = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda group: -group[0])
        least = merged[-1][0]
        order += 1  # ties go by age, so that the result is the same on every machine
        heapq.heappush(heap, (-(merged[0][0] - least), order, merged))
    return [members for _, members in heap[0][2]] if heap else [[] for _ in range(parts)]


def _rank_pieces(chosen: Sequence[ShardingOption]) -> list[tuple[float, int, int]]:
    """(time, table, slice) of what goes to single ranks, longest first."""
    pieces = [
        (time_ms, table, index)
        for table, option in enumerate(chosen)
        if option.reach == "rank"
        for index, time_ms in enumerate(option.slice_ms)
    ]
    return sorted(pieces, key=lambda piece: (-piece[0], piece[1], piece[2]))


def _place_shared(placement: Placement, tables: Sequence[int]) -> None:
    for table in tables:
        placement.put(table, placement.chosen[table], ())


def best_node(placement: Placement, option: ShardingOption) -> int | None:
    """The node whose slowest rank is the fastest, among those with memory."""
    limits = placement.limits
    times = placement.loads.reshape(-1, limits.node_size).max(axis=1)
    room = placement.used[option.tier].reshape(-1, limits.node_size).max(axis=1) + option.slice_bytes[0]
    times = np.where(room <= limits.tier_bytes[option.tier], times, np.inf)
    best = int(times.argmin())
    return best if np.isfinite(times[best]) else None
