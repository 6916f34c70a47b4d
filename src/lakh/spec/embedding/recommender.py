"""A recommendation model and its data: the section `dlrm` of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from lakh import config
from lakh.errors import ConfigError
from lakh.spec.embedding.memory import TableMemory
from lakh.spec.embedding.network import ClickNetwork
from lakh.spec.embedding.table import EmbeddingTable, check_tables

__all__ = ["SYNTHETIC", "CommDtype", "Recommender"]

SYNTHETIC = "synthetic"
CommDtype = Literal["f32", "bf16", "f16", "int8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommender:
    dataset: str = SYNTHETIC
    """"synthetic" for random clicks, or MovieLens-100k: the wheel of recbole, or a folder with its ml-100k files."""
    samples: int = 100_000
    """Samples of the synthetic data set."""
    tables: tuple[EmbeddingTable, ...] = ()
    """Embedding tables, each named like its feature of the data set; all of one width."""
    network: ClickNetwork = field(default_factory=ClickNetwork)
    lr: float = 0.02
    """Peak learning rate of the tables; it follows the schedule of optim.lr."""
    state_width: int = 0
    """Columns of a table that share one row-wise optimizer state; 0: all columns. Column-wise sharding cuts a table at
    multiples of it, so that the result does not depend on the sharding."""
    sharding: str = "auto"
    """How ranks hold the tables: "auto" for the planner's choice, one kind for all tables ("data-parallel",
    "table-wise", "column-wise", "row-wise", "table-row-wise"), or a file of `lakh dlrm plan --out`."""
    memory: TableMemory = field(default_factory=TableMemory)
    forward_dtype: CommDtype = "f32"
    """Type of pooled embeddings on the network; "int8" has one scale per row."""
    backward_dtype: CommDtype = "f32"
    """Type of the gradients of pooled embeddings on the network."""

    def __post_init__(self) -> None:
        config.require_positive(self, "samples")
        config.require(self, "lr", lambda lr: 0 < lr < math.inf, "is not positive", "choose e.g. 0.02")
        config.require_not_negative(self, "state_width")
        if not self.tables:
            return
        check_tables(self.tables, "tables")
        if len({table.width for table in self.tables}) > 1:
            found = f"have the widths {sorted({table.width for table in self.tables})}"
            raise ConfigError("tables", found, "give all tables one width: their embeddings interact as vectors")
        if self.state_width and (self.state_width % 4 or self.width % self.state_width):
            found = f"{self.state_width} is not a multiple of 4 that divides the width {self.width} of the tables"
            raise ConfigError("state_width", found, "choose a divisor, or 0")

    @property
    def width(self) -> int:
        return self.tables[0].width if self.tables else 0

    @property
    def embeddings(self) -> int:
        """Pooled embeddings of a sample."""
        return sum(table.features for table in self.tables)

    @property
    def dense_parameters(self) -> int:
        return self.network.parameters(self.embeddings, self.width)

    @property
    def parameters(self) -> int:
        return self.dense_parameters + sum(table.rows * table.width for table in self.tables)

    @property
    def flops_per_sample(self) -> float:
        """Training FLOPs of the matrix products of one sample."""
        return 6.0 * self.dense_parameters
