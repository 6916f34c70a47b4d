"""Embedding tables that are sharded over ranks, as a module: bags of this rank's samples in, pooled embeddings out.

    tables = ShardedTables(exchange, seed=1, settings=SparseSettings())
    out_BC = tables(exchange.distribute(bags))
    loss(out_BC).backward()
    tables.step(lr=0.01)

On one rank, and for tables that every rank holds, a lookup is local. A row is updated once per step with the gradients
of all ranks in their order, so table-wise and column-wise sharding have the bits of a single process.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lakh.errors import UserError
from lakh.spec.embedding import TableSlice
from lakh.workloads.dlrm.embedding.bags import EmbeddingBags, HeldTensor, SparseSettings
from lakh.workloads.dlrm.embedding.cached_bags import CachedEmbeddingBags, CachedRows
from lakh.workloads.dlrm.embedding.gpu_tables import GpuTables
from lakh.workloads.dlrm.embedding.lookup import Lookup
from lakh.workloads.dlrm.sharding.exchange import DistributedBags, TableExchange

__all__ = ["ShardedTables"]

HeldTables = EmbeddingBags | CachedEmbeddingBags | GpuTables


class ShardedTables(nn.Module):
    steps: Tensor

    def __init__(
        self,
        exchange: TableExchange,
        *,
        seed: int,
        settings: SparseSettings | None = None,
        caches: Mapping[str, CachedRows] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`caches`: of the tables that are not in the plan's tier "device". `device`: a GPU, or the CPU by default."""
        super().__init__()
        layout = exchange.layout
        self.exchange, self.device = exchange, device or torch.device("cpu")

        def held(parts: tuple[TableSlice, ...]) -> HeldTables | None:
            if not parts:
                return None
            cached = [part.table.name for part in parts if caches and part.table.name in caches]
            if self.device.type != "cpu":
                if cached:
                    found = f"is in the tier {layout.tiers[cached[0]]}, and a GPU trains tables of its own memory only"
                    raise UserError(f"table {cached[0]}", found, "use more ranks, or set train.device to cpu")
                return GpuTables(parts, seed=seed, device=self.device, settings=settings)
            if not cached or caches is None:
                return EmbeddingBags(parts, seed=seed, settings=settings)
            return CachedEmbeddingBags(parts, seed=seed, settings=settings, caches=caches)

        self.sharded, self.replicated = held(layout.sharded[exchange.rank].slices), held(layout.replicated.slices)
        self.gradient_scale = 1.0
        """Factor of the gradients at the next step."""
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._anchor = torch.zeros((), requires_grad=True)  # makes autograd call backward; it has no gradient

    def forward(self, bags: DistributedBags) -> Tensor:
        return Lookup.apply(self._anchor, self, bags)

    def step(self, lr: float) -> None:
        for tables in self._held():
            tables.steps.copy_(self.steps)
            tables.step(lr, self.gradient_scale)
        self.steps += 1
        self.gradient_scale = 1.0

    def discard(self) -> None:
        for tables in self._held():
            tables.discard()
        self.gradient_scale = 1.0

    def gradient_square(self) -> float:
        """This rank's part of the sum of squares of the tables' gradients since the last step."""
        own = self.sharded.gradient_square() if self.sharded else 0.0
        copied = self.replicated.gradient_square() if self.replicated else 0.0
        return own + copied / self.exchange.ranks

    @property
    def cache_counts(self) -> tuple[int, int]:
        """(rows that a lookup found in a cache, rows that it did not)"""
        caches = [
            cache for tables in self._held() if isinstance(tables, CachedEmbeddingBags) for cache in tables.caches
        ]
        return sum(cache.hits for cache in caches), sum(cache.misses for cache in caches)

    def _held(self) -> list[HeldTables]:
        return [tables for tables in (self.sharded, self.replicated) if tables is not None]

    def lookup(self, bags: DistributedBags) -> Tensor:
        layout = self.exchange.layout
        for tables, field in ((self.sharded, "sharded"), (self.replicated, "replicated_of_all")):
            if isinstance(tables, CachedEmbeddingBags):
                coming = [getattr(later, field) for later in bags.coming]
                tables.look_ahead([later for later in coming if later is not None])
        local = self.replicated.lookup(bags.replicated) if self.replicated and bags.replicated else None
        if local is not None and local.shape[1] == layout.columns:
            return local
        out_BC = torch.zeros(bags.batch, layout.columns, device=self.device)  # partial sums of row ranges are added
        pooled = self.sharded.lookup(bags.sharded) if self.sharded and bags.sharded else None
        counts_as = "forward" if self.training else "evaluation"
        self.exchange.return_pooled(pooled, bags.batch, out_BC, counts_as=counts_as)
        if local is not None:
            for own, target, width, _ in layout.replicated.moves.tolist():
                out_BC[:, target : target + width] = local[:, own : own + width]
        return out_BC

    def keep_gradient(self, bags: DistributedBags, grad_BC: Tensor) -> None:
        replicated, sharded = self.exchange.send_gradients(grad_BC)
        if self.replicated and bags.replicated_of_all and replicated is not None:
            self.replicated.keep_gradient(bags.replicated_of_all, replicated)
        if self.sharded and bags.sharded and sharded is not None:
            self.sharded.keep_gradient(bags.sharded, sharded)

    def held_tensors(self) -> dict[tuple[str, str], tuple[HeldTensor, bool]]:
        """This rank's parts of weights and optimizer states, and whether this rank is the first that holds them."""
        found: dict[tuple[str, str], tuple[HeldTensor, bool]] = {}
        for tables in self._held():
            is_first = tables is self.sharded or self.exchange.rank == 0
            found |= {key: (part, is_first and part.local.numel() > 0) for key, part in tables.held_tensors().items()}
        return found
