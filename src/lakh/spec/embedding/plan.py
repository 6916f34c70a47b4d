"""Which rank holds which part of each embedding table.

The planner makes an `EmbeddingPlan`; TorchRec can run it. `check_plan` proves that it covers every value of every
table exactly once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lakh.errors import InfeasiblePlan
from lakh.spec.embedding.table import EmbeddingTable

__all__ = ["EmbeddingPlan", "EmbeddingShard", "MemoryTier", "ShardingKind", "check_plan"]

ShardingKind = Literal["data-parallel", "table-wise", "column-wise", "row-wise", "table-row-wise"]
"""Whole copies on all ranks; one rank; slices of columns; ranges of rows on all ranks, or on the ranks of one node."""

MemoryTier = Literal["device", "host", "file"]


@dataclass(frozen=True, slots=True)
class EmbeddingShard:
    """A rectangle of a table on one rank: rows [first, end) and columns [first, end)."""

    table: str
    kind: ShardingKind
    tier: MemoryTier
    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    cost_ms: float
    """Estimated time that this shard adds to a step of its rank."""
    bytes: int
    """Weights, optimizer state and buffers, in the memory of its tier."""

    @property
    def values(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    ranks: int
    node_size: int
    shards: tuple[EmbeddingShard, ...]

    def of_rank(self, rank: int) -> list[EmbeddingShard]:
        return [shard for shard in self.shards if shard.rank == rank]

    def rank_ms(self) -> list[float]:
        loads = [0.0] * self.ranks
        for shard in self.shards:
            loads[shard.rank] += shard.cost_ms
        return loads

    def rank_bytes(self, tier: MemoryTier) -> list[int]:
        used = [0] * self.ranks
        for shard in self.shards:
            used[shard.rank] += shard.bytes if shard.tier == tier else 0
        return used


def check_plan(plan: EmbeddingPlan, tables: Sequence[EmbeddingTable]) -> None:
    """Raise InfeasiblePlan unless every table is covered exactly once (data-parallel: once on each rank)."""
    by_table = defaultdict(list)
    for shard in plan.shards:
        by_table[shard.table].append(shard)
    names = {table.name for table in tables}
    if unknown := sorted(by_table.keys() - names):
        raise InfeasiblePlan("plan", f"shards a table that the model does not have: {unknown[0]}", "plan again")
    for table in tables:
        if reason := _coverage_error(table, by_table[table.name], plan):
            raise InfeasiblePlan(f"plan, table {table.name}", reason, "plan again, or fix the shards of this table")


def _coverage_error(table: EmbeddingTable, shards: list[EmbeddingShard], plan: EmbeddingPlan) -> str:
    """Why the shards do not hold the table exactly once; empty if they do."""
    if not shards:
        return "has no shard"
    if len({shard.kind for shard in shards}) > 1:
        return f"is sharded in several ways: {', '.join(sorted({shard.kind for shard in shards}))}"
    for shard in shards:
        if not 0 <= shard.rank < plan.ranks:
            return f"has a shard on rank {shard.rank} of {plan.ranks}"
        for what, (first, end), size in (("rows", shard.rows, table.rows), ("columns", shard.columns, table.width)):
            if not 0 <= first <= end <= size:
                return f"has a shard of {what} [{first}, {end}) of {size}"
    if shards[0].kind == "data-parallel":
        whole = [shard.rank for shard in shards if shard.values == table.rows * table.width]
        if sorted(whole) != list(range(plan.ranks)) or len(shards) != plan.ranks:
            return "is data-parallel without exactly one whole copy on each rank"
        return ""
    if shards[0].kind == "table-row-wise" and len({shard.rank // plan.node_size for shard in shards}) > 1:
        return f"is table-row-wise with ranks of several nodes of {plan.node_size}"
    filled = [shard for shard in shards if shard.values]
    covered = sum(shard.values for shard in filled)
    if covered != table.rows * table.width:
        return f"has {table.rows * table.width:,} values, its shards hold {covered:,}"
    return _overlap(filled)


def _overlap(shards: list[EmbeddingShard]) -> str:
    """Two rectangles that share values. Shards of one table form a grid, so a sweep over rows stays short."""
    open_shards: list[EmbeddingShard] = []
    for shard in sorted(shards, key=lambda s: (s.rows, s.columns)):
        open_shards = [other for other in open_shards if other.rows[1] > shard.rows[0]]
        for other in open_shards:
            if other.columns[0] < shard.columns[1] and shard.columns[0] < other.columns[1]:
                return f"has overlapping shards on ranks {other.rank} and {shard.rank}"
        open_shards.append(shard)
    return ""
