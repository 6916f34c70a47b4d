"""The sharding plan of a run's tables. Independent of torch."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import get_args

from lakh.errors import InfeasiblePlan, UserError
from lakh.planner.embedding.cost_model import MemorySizes
from lakh.planner.embedding.plan_file import read_plan
from lakh.spec import Run
from lakh.spec.embedding import EmbeddingPlan, EmbeddingShard, EmbeddingTable, MemoryTier, ShardingKind, check_plan

__all__ = ["plan_of", "plan_of_kind"]

MEMORY_SHARE = 0.85


def plan_of(run: Run, ranks: int) -> EmbeddingPlan:
    """The plan that `dlrm.sharding` asks for, in which each rank holds at most one part of a table."""
    settings = run.dlrm
    node_size = min(run.cluster.node_size, ranks)
    is_file = settings.sharding != "auto" and settings.sharding not in get_args(ShardingKind)
    if ranks == 1 or run.mesh.resolve(ranks).dp_replicate > 1:  # replicas hold all tables
        plan = plan_of_kind("data-parallel", settings.tables, ranks, node_size)
        tiers = _tiers_of(_read(settings.sharding, ranks)) if is_file and ranks == 1 else _assign_tiers(run, plan)
        plan = _with_tiers(plan, tiers)
    elif is_file:
        plan = _read(settings.sharding, ranks)
    elif settings.sharding == "auto":
        plan = _planned(run, ranks)
    else:
        kind: ShardingKind = settings.sharding  # type: ignore[assignment]
        plan = plan_of_kind(kind, settings.tables, ranks, node_size, min_width=settings.state_width)
        plan = _with_tiers(plan, _assign_tiers(run, plan))
    plan = _one_part_per_rank(plan)
    check_plan(plan, settings.tables)
    if run.mesh.resolve(ranks).dp_replicate > 1 and any(shard.tier != "device" for shard in plan.shards):
        found = "replicas continue without a lost one, which needs all rows in memory"
        raise InfeasiblePlan("mesh.dp_replicate", found, "set it to 1, or give the tables more device memory")
    return plan


def _read(path: str, ranks: int) -> EmbeddingPlan:
    plan = read_plan(path)
    if plan.ranks != ranks:
        found = f"is a plan for {plan.ranks} ranks, and there are {ranks}"
        raise UserError(f"dlrm.sharding = {path}", found, "plan for this number of ranks")
    return plan


def _memory_sizes(run: Run) -> MemorySizes:
    memory = run.dlrm.memory
    device = memory.device_gib * 2**30 or run.cluster.gpu.memory_bytes * MEMORY_SHARE
    return MemorySizes(device=device, host=memory.host_gib * 2**30, file=memory.file_gib * 2**30)


def _tiers_of(plan: EmbeddingPlan) -> dict[str, MemoryTier]:
    return {shard.table: shard.tier for shard in plan.shards}


def _with_tiers(plan: EmbeddingPlan, tiers: Mapping[str, MemoryTier]) -> EmbeddingPlan:
    shards = tuple(dataclasses.replace(shard, tier=tiers.get(shard.table, shard.tier)) for shard in plan.shards)
    return dataclasses.replace(plan, shards=shards)


def _assign_tiers(run: Run, plan: EmbeddingPlan) -> dict[str, MemoryTier]:
    """The fastest tier that has room for each table, those with the most lookups per byte first."""
    if not run.dlrm.memory.is_limited:
        return {}
    sizes = dataclasses.asdict(_memory_sizes(run))
    free = {tier: [size] * plan.ranks for tier, size in sizes.items()}
    tiers: dict[str, MemoryTier] = {}
    for table in sorted(run.dlrm.tables, key=lambda t: -t.pooling * t.features / t.rows):
        needed = {shard.rank: shard.bytes for shard in plan.shards if shard.table == table.name}
        for tier in get_args(MemoryTier):
            if all(free[tier][rank] >= size for rank, size in needed.items()):
                break
        else:
            found = f"{max(needed.values()) / 2**30:,.3f} GiB on a rank do not fit into what other tables leave free"
            raise InfeasiblePlan(f"table {table.name}", found, "raise dlrm.memory.host_gib or file_gib")
        for rank, size in needed.items():
            free[tier][rank] -= size
        tiers[table.name] = tier
    return tiers


def plan_of_kind(
    kind: ShardingKind, tables: Sequence[EmbeddingTable], ranks: int, node_size: int, *, min_width: int = 0
) -> EmbeddingPlan:
    """All tables sharded in one way, spread evenly over the ranks by their lookups."""
    loads = [0.0] * ranks
    shards: list[EmbeddingShard] = []
    for table in sorted(tables, key=lambda t: -t.rows * t.width):
        whole_rows, whole_columns = (0, table.rows), (0, table.width)
        parts: list[tuple[int, tuple[int, int], tuple[int, int]]]
        if kind == "data-parallel":
            parts = [(rank, whole_rows, whole_columns) for rank in range(ranks)]
        elif kind == "table-wise":
            parts = [(min(range(ranks), key=lambda rank: loads[rank]), whole_rows, whole_columns)]
        elif kind == "column-wise":
            block = min_width or table.width
            count = min(ranks, table.width // block)
            free = sorted(sorted(range(ranks), key=lambda rank: loads[rank])[:count])
            cuts = _cuts(table.width // block, count)
            parts = [(rank, whole_rows, (a * block, b * block)) for rank, (a, b) in zip(free, cuts, strict=True)]
        else:
            members = range(ranks)
            if kind == "table-row-wise":
                nodes = [range(first, min(first + node_size, ranks)) for first in range(0, ranks, node_size)]
                members = min(nodes, key=lambda node: sum(loads[rank] for rank in node))
            parts = [
                (rank, rows, whole_columns) for rank, rows in zip(members, _cuts(table.rows, len(members)), strict=True)
            ]
        for rank, rows, columns in parts:
            size = (rows[1] - rows[0], columns[1] - columns[0])
            loads[rank] += table.pooling * size[1] * size[0] / table.rows
            shards.append(EmbeddingShard(table.name, kind, "device", rank, rows, columns, 0.0, table.bytes_of(*size)))
    return EmbeddingPlan(ranks, node_size, tuple(shards))


def _planned(run: Run, ranks: int) -> EmbeddingPlan:
    from lakh.planner.embedding.cost_model import cost_model
    from lakh.planner.embedding.sharding import plan_sharding

    settings, cluster = run.dlrm, run.cluster
    costs = cost_model(
        "cluster",
        cluster,
        ranks,
        batch=run.data.batch // ranks,
        min_width=settings.state_width or settings.width,
        memory=_memory_sizes(run),
    )
    return plan_sharding(settings.tables, costs, costs.limits).plan


def _cuts(size: int, parts: int) -> list[tuple[int, int]]:
    """Consecutive ranges of about equal size; some are empty if there are more parts than values."""
    return [(size * part // parts, size * (part + 1) // parts) for part in range(parts)]


def _one_part_per_rank(plan: EmbeddingPlan) -> EmbeddingPlan:
    """Join the column slices of a table on one rank: columns are assigned in the order of the ranks. Slices of one
    table differ in their width only, so this changes no rank's work."""
    by_table: dict[str, list[EmbeddingShard]] = defaultdict(list)
    for shard in plan.shards:
        by_table[shard.table].append(shard)
    shards: list[EmbeddingShard] = []
    for name, parts in by_table.items():
        if parts[0].kind != "column-wise":
            if len({part.rank for part in parts}) != len(parts):
                raise InfeasiblePlan(f"plan, table {name}", "has two row ranges on one rank", "join them")
            shards += parts
            continue
        first = 0
        for rank in sorted({part.rank for part in parts}):
            here = [part for part in parts if part.rank == rank]
            width = sum(part.columns[1] - part.columns[0] for part in here)
            cost, size = sum(part.cost_ms for part in here), sum(part.bytes for part in here)
            columns = (first, first + width)
            shards.append(dataclasses.replace(here[0], columns=columns, cost_ms=cost, bytes=size))
            first += width
    return dataclasses.replace(plan, shards=tuple(shards))
