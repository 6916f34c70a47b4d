"""DLRM and DCNv2: a dense network over pooled embeddings that predicts a click.

Both put the numeric features through a bottom MLP. DLRM (Naumov et al. 2019) takes the inner products of all pairs of
embeddings, DCNv2 (Wang et al. 2021) multiplies the concatenation with linear maps of itself in low-rank cross layers.
A top MLP gives the logit.

The tables are a module that maps bags to pooled embeddings, so that the same network works with the tables of one
rank, with sharded ones, or with those of another library. Every rank holds the whole dense network.

Legend: B samples, N numeric features, F features with embeddings, W their width, C columns of the pooled embeddings.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lakh.errors import ConfigError
from lakh.spec.embedding import ClickNetwork, EmbeddingTable
from lakh.workloads.dlrm.batch import ClickBatch
from lakh.workloads.dlrm.interaction import pair_products
from lakh.workloads.dlrm.sharding.tables import ShardedTables
from lakh.workloads.replicated import ReplicatedModule

__all__ = ["ClickModel"]


class ClickModel(ReplicatedModule):
    def __init__(
        self, network: ClickNetwork, features: Sequence[EmbeddingTable], tables: nn.Module, *, seed: int
    ) -> None:
        """`features` are the tables of `tables`, in the order of its columns."""
        super().__init__()
        widths = {table.width for table in features}
        if len(widths) != 1:
            found = f"are {sorted(widths)} wide"
            raise ConfigError("tables", found, "give all tables one width: their embeddings interact as vectors")
        self.network, self.tables, self.width = network, tables, widths.pop()
        count = sum(table.features for table in features) + 1  # and the output of the bottom MLP
        random = torch.Generator().manual_seed(seed)
        self.bottom = _mlp([network.dense_features, *network.bottom, self.width], random)
        columns = count * self.width
        if network.interaction == "dot":
            columns = self.width + count * (count - 1) // 2
        else:
            self.cross = nn.ModuleList(_Cross(columns, network.cross_rank, random) for _ in range(network.cross_layers))
        self.top = _mlp([columns, *network.top, 1], random)[:-1]  # the logit has no ReLU

    def forward(self, batch: ClickBatch) -> Tensor:
        """The logits of the samples."""
        dense_BW = self.bottom(batch.dense_BN)
        x_BC = torch.cat([dense_BW, self.tables(batch.bags)], dim=1)
        if self.network.interaction == "dot":
            x_BC = torch.cat([dense_BW, pair_products(x_BC.view(len(x_BC), -1, self.width))], dim=1)
        else:
            first_BC = x_BC
            for layer in self.cross:
                x_BC = first_BC * layer(x_BC) + x_BC
        return self.top(x_BC).squeeze(1)

    @property
    def ranks(self) -> int:
        return self.tables.exchange.ranks if isinstance(self.tables, ShardedTables) else 1

    def reduce_gradients(self) -> None:
        if isinstance(self.tables, ShardedTables):
            self.tables.exchange.average_gradients(self.dense_parameters())

    def sparse_square(self) -> float:
        return self.tables.gradient_square() if isinstance(self.tables, ShardedTables) else 0.0

    def scale_sparse(self, factor: Tensor) -> None:
        if isinstance(self.tables, ShardedTables):
            self.tables.gradient_scale = float(factor)

    def dense_parameters(self) -> list[nn.Parameter]:
        """The parameters outside of the tables, for an optimizer of torch."""
        own = {id(parameter) for parameter in self.tables.parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in own]


class _Cross(nn.Sequential):
    """A linear map of low rank."""

    def __init__(self, columns: int, rank: int, random: torch.Generator) -> None:
        down, up = nn.Linear(columns, rank, bias=False), nn.Linear(rank, columns)
        for layer in (down, up):
            _init(layer, random)
        super().__init__(down, up)


def _mlp(widths: Sequence[int], random: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        linear = nn.Linear(inner, outer)
        _init(linear, random)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers)


def _init(linear: nn.Linear, random: torch.Generator) -> None:
    """Glorot's normal distribution, as in the reference implementation of DLRM."""
    nn.init.normal_(linear.weight, std=(2 / (linear.in_features + linear.out_features)) ** 0.5, generator=random)
    if linear.bias is not None:
        nn.init.normal_(linear.bias, std=(1 / linear.out_features) ** 0.5, generator=random)
