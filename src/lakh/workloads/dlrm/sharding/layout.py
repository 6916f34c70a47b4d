"""A sharding plan as each rank executes it: its parts of tables, and where their columns are. Independent of torch.

The pooled embeddings of a sample have C columns, one table after the other. A rank's parts have columns of their own,
side by side; `moves` map them to the C columns of the sample.

Table-row-wise tables have an exchange of two levels if there are several nodes of equal size: a node adds the partial
sums of its ranks before they leave it. All tables of this kind on one node have columns of their own too, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lakh.spec.embedding import EmbeddingPlan, EmbeddingTable, TableSlice

__all__ = ["RankParts", "ShardLayout"]


@dataclass(frozen=True, eq=False)
class RankParts:
    """The parts of tables that a rank looks up for all ranks, or that a node does."""

    slices: tuple[TableSlice, ...]
    lookups: np.ndarray
    """int64, per feature of a part: feature, first row, end row."""
    moves: np.ndarray
    """int64, per feature of a part: its first own column, its first column in the sample, columns, and whether its
    values are added to those of other ranks, as for a range of rows."""

    @property
    def columns(self) -> int:
        return int(self.moves[:, 2].sum())

    @property
    def widths(self) -> np.ndarray:
        return self.moves[:, 2]


class ShardLayout:
    def __init__(self, plan: EmbeddingPlan, tables: Sequence[EmbeddingTable]) -> None:
        self.plan, self.tables, self.ranks = plan, tuple(tables), plan.ranks
        self.node_size = plan.node_size
        kinds = {shard.table: shard.kind for shard in plan.shards}
        tiers = {shard.table: shard.tier for shard in plan.shards}
        self.tiers = tiers
        """Memory tier of each table."""
        self.replicated = self._parts(
            [TableSlice.whole(table) for table in tables if kinds[table.name] == "data-parallel"]
        )
        """Tables that every rank holds, looks up for itself and updates with the gradients of all ranks."""
        of_nodes = {name for name, kind in kinds.items() if kind == "table-row-wise"}
        if plan.node_size < 2 or plan.node_size >= plan.ranks or plan.ranks % plan.node_size:
            of_nodes = set()
        slices = [self._slices_of(rank) for rank in range(plan.ranks)]
        self.flat = [self._parts([s for s in held if s.table.name not in of_nodes]) for held in slices]
        """By rank: parts whose pooled embeddings go to the ranks of their samples directly."""
        self.in_node = [self._parts([s for s in held if s.table.name in of_nodes]) for held in slices]
        """By rank: ranges of rows whose partial sums are added inside the node first."""
        self.sharded = [
            self._parts([*flat.slices, *inner.slices]) for flat, inner in zip(self.flat, self.in_node, strict=True)
        ]
        """By rank: both, in this order."""
        node_of = {shard.table: shard.rank // plan.node_size for shard in plan.shards if shard.table in of_nodes}
        self.nodes = [
            self._parts([TableSlice.whole(table) for table in tables if node_of.get(table.name) == node])
            for node in range(plan.ranks // plan.node_size if of_nodes else 0)
        ]
        """By node: its table-row-wise tables; empty if there are none."""
        self.features = sum(table.features for table in tables)
        self.columns = sum(table.features * table.width for table in tables)

    def moves_to_node(self, rank: int) -> np.ndarray:
        """As `moves`, from the columns of a rank's parts in `in_node` to those of its node."""
        targets = {int(target): int(own) for own, target, _, _ in self.nodes[rank // self.node_size].moves}
        moves = [(own, targets[int(target)], width, 0) for own, target, width, _ in self.in_node[rank].moves]
        return np.array(moves, np.int64).reshape(-1, 4)

    def _slices_of(self, rank: int) -> list[TableSlice]:
        held = {shard.table: shard for shard in self.plan.of_rank(rank) if shard.kind != "data-parallel"}
        return [
            TableSlice(table, held[table.name].rows, held[table.name].columns)
            for table in self.tables
            if table.name in held and held[table.name].values
        ]

    def _parts(self, slices: list[TableSlice]) -> RankParts:
        feature_of, column_of = {}, {}
        feature = column = 0
        for table in self.tables:
            feature_of[table.name], column_of[table.name] = feature, column
            feature += table.features
            column += table.features * table.width
        lookups, moves, own = [], [], 0
        for part in slices:
            name, width = part.table.name, part.shape[1]
            for number in range(part.table.features):
                lookups.append((feature_of[name] + number, *part.rows))
                target = column_of[name] + number * part.table.width + part.columns[0]
                moves.append((own, target, width, int(part.rows != (0, part.table.rows))))
                own += width
        return RankParts(
            tuple(slices), np.array(lookups, np.int64).reshape(-1, 3), np.array(moves, np.int64).reshape(-1, 4)
        )
