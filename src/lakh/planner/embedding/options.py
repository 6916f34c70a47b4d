"""A way to shard one table, with what it costs each rank. The planner chooses one option per table and places it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from lakh.spec.embedding import EmbeddingTable, MemoryTier, ShardingKind

__all__ = ["EmbeddingCosts", "ShardingLimits", "ShardingOption", "column_slices", "uneven_slices"]


@dataclass(frozen=True, slots=True)
class ShardingOption:
    kind: ShardingKind
    tier: MemoryTier
    widths: tuple[int, ...]
    """Columns of each slice; one slice unless the table is split column-wise."""
    slice_ms: tuple[float, ...]
    """Time that a slice adds to a step of each rank that holds a part of it."""
    slice_bytes: tuple[int, ...]
    """Memory of the tier that a slice takes on each rank that holds a part of it."""
    reach: Literal["rank", "node", "all"]
    """Who holds a slice: one rank, all ranks of one node, or all ranks."""

    def ranks_of_slice(self, ranks: int, node_size: int) -> int:
        return {"rank": 1, "node": node_size, "all": ranks}[self.reach]

    def work_ms(self, ranks: int, node_size: int) -> float:
        """Time summed over all ranks."""
        return sum(self.slice_ms) * self.ranks_of_slice(ranks, node_size)

    @property
    def largest_ms(self) -> float:
        """The least time of the slowest rank with this option."""
        return max(self.slice_ms)


@dataclass(frozen=True, slots=True)
class ShardingLimits:
    """What a plan may use: ranks, and bytes of each memory tier on one rank."""

    ranks: int
    node_size: int
    tier_bytes: dict[MemoryTier, float]
    min_width: int = 32
    """Column-wise slices are at least this wide."""


class EmbeddingCosts(Protocol):
    """Where options and their costs come from: a cost model, or an imported plan."""

    @property
    def name(self) -> str: ...

    def options(self, table: EmbeddingTable) -> list[ShardingOption]: ...


def column_slices(width: int, slices: int) -> tuple[int, ...]:
    """Widths of `slices` nearly equal slices, each a multiple of 4."""
    quads = width // 4
    small, larger = divmod(quads, slices)
    return tuple(4 * (small + (index < larger)) for index in range(slices))


def uneven_slices(width: int, min_width: int) -> list[tuple[int, ...]]:
    """Splits into a wide and a narrow slice, or one of half the width and two of a quarter: they fill ranks that have
    room for a part of a table. Eighths of the width at least, and no narrower than `min_width`."""
    unit = 4 * -(-max(min_width, width // 8) // 4)
    found: list[tuple[int, ...]] = [(width - narrow, narrow) for narrow in range(unit, (width + 1) // 2, unit)]
    quarter = width // 4
    if width % 16 == 0 and quarter >= unit:
        found.append((width - 2 * quarter, quarter, quarter))
    return found
