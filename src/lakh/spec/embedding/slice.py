"""A rectangle of an embedding table."""

from __future__ import annotations

from dataclasses import dataclass

from lakh.spec.embedding.table import EmbeddingTable

__all__ = ["TableSlice"]


@dataclass(frozen=True, slots=True)
class TableSlice:
    """Rows and columns of a table: [first, end)."""

    table: EmbeddingTable
    rows: tuple[int, int]
    columns: tuple[int, int]

    @classmethod
    def whole(cls, table: EmbeddingTable) -> TableSlice:
        return cls(table, (0, table.rows), (0, table.width))

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
