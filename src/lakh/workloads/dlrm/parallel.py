"""The recommendation model on this rank: sharded tables under a dense network that every rank holds."""

from __future__ import annotations

import math

import torch

from lakh.spec import Run
from lakh.workloads.dlrm.embedding.bags import SparseSettings
from lakh.workloads.dlrm.embedding.cached_bags import CachedRows
from lakh.workloads.dlrm.model import ClickModel
from lakh.workloads.dlrm.sharding.exchange import TableExchange
from lakh.workloads.dlrm.sharding.layout import ShardLayout
from lakh.workloads.dlrm.sharding.plans import plan_of
from lakh.workloads.dlrm.sharding.tables import ShardedTables

__all__ = ["build_exchange", "build_model"]

STEP_MARGIN = 1.5  # rows of a step that a cache holds at least, over the mean number of lookups


def build_exchange(run: Run, rank: int, ranks: int) -> TableExchange:
    """The communication of the tables on this rank; every rank makes the same plan. A collective."""
    layout = ShardLayout(plan_of(run, ranks), run.dlrm.tables)
    return TableExchange(
        layout,
        rank,
        forward_dtype=run.dlrm.forward_dtype,
        backward_dtype=run.dlrm.backward_dtype,
        timeout_s=run.train.peer_timeout_s,
    )


def build_model(run: Run, exchange: TableExchange, device: torch.device) -> ClickModel:
    settings, caches = SparseSettings(state_width=run.dlrm.state_width), _caches(run, exchange.layout)
    tables = ShardedTables(exchange, seed=run.seed, settings=settings, caches=caches, device=device)
    return ClickModel(run.dlrm.network, run.dlrm.tables, tables, seed=run.seed).to(device)


def _caches(run: Run, layout: ShardLayout) -> dict[str, CachedRows]:
    """The caches of the tables in host memory and in files."""
    memory, found = run.dlrm.memory, {}
    for table in layout.tables:
        tier = layout.tiers[table.name]
        if tier == "device":
            continue
        rows_of_step = run.data.batch * table.features * table.pooling * STEP_MARGIN
        slots = math.ceil(max(memory.cache_share * table.rows, rows_of_step))
        folder = memory.folder if tier == "file" else None
        found[table.name] = CachedRows(slots=slots, folder=folder, policy=memory.cache_policy)
    return found
