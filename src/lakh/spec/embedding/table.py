"""An embedding table of a recommendation model: its size, its lookups and its optimizer state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lakh import config
from lakh.errors import ConfigError

__all__ = ["DTYPE_BYTES", "EmbeddingTable", "check_tables"]

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


def check_tables(tables: Sequence[EmbeddingTable], origin: str) -> None:
    if not tables:
        raise ConfigError(origin, "has no tables", "list at least one under [[tables]]")
    seen: set[str] = set()
    for table in tables:
        if table.name in seen:
            raise ConfigError(origin, f"names the table {table.name!r} twice", "give each table its own name")
        seen.add(table.name)
