"""Embedding tables of a recommendation model, and a plan that says which rank holds which part of each table.

The planner makes an `EmbeddingPlan`, the trainer shards by it and checkpoints store it. `check_plan` proves that a plan
covers every value of every table exactly once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lakh import config
from lakh.errors import ConfigError, InfeasiblePlan

__all__ = [
    "DTYPE_BYTES",
    "EmbeddingPlan",
    "EmbeddingShard",
    "EmbeddingTable",
    "MemoryTier",
    "ShardingKind",
    "check_plan",
    "check_tables",
]

ShardingKind = Literal["data-parallel", "table-wise", "column-wise", "row-wise", "table-row-wise"]
"""Whole copies on all ranks; one rank; slices of columns; ranges of rows on all ranks, or on the ranks of one node."""

MemoryTier = Literal["device", "host", "file"]

DTYPE_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
WIDTH_MULTIPLE = 4
"""Kernels read rows as vectors of four values (FBGEMM has the same limit)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingTable:
    name: str
    """Name of the table, unique in the model."""
    rows: int
    """Number of embeddings (the hash size)."""
    width: int
    """Values of one embedding (the embedding dimension)."""
    pooling: float = 1.0
    """Mean number of ids in one bag (the pooling factor)."""
    features: int = 1
    """Features that look up this table, each with one bag per sample."""
    dtype: Literal["f32", "bf16", "f16"] = "f32"
    """Type of the weights."""
    optimizer: Literal["sgd", "rowwise-adagrad", "rowwise-adam"] = "rowwise-adagrad"
    """Sparse optimizer, for the size of its state."""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ConfigError("name", "is empty", "name the table")
        config.require_positive(self, "rows", "width", "features")
        config.require(self, "width", lambda w: w % WIDTH_MULTIPLE == 0, "is not a multiple of 4", "pad the table")
        todo = "give the mean number of ids per bag, or remove a table that nothing looks up"
        config.require(self, "pooling", lambda p: 0 < p < math.inf, "is not a positive number", todo)

    @property
    def value_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def bytes_of(self, rows: int, width: int) -> int:
        """Weights and optimizer state of a shard. Row-wise states hold one f32 per row of *each* shard."""
        state = {"sgd": 0, "rowwise-adagrad": 4, "rowwise-adam": 4 + 4 * width}[self.optimizer]
        return rows * (width * self.value_bytes + state)


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


def check_tables(tables: Sequence[EmbeddingTable], origin: str) -> None:
    if not tables:
        raise ConfigError(origin, "has no tables", "list at least one under [[tables]]")
    seen: set[str] = set()
    for table in tables:
        if table.name in seen:
            raise ConfigError(origin, f"names the table {table.name!r} twice", "give each table its own name")
        seen.add(table.name)


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
