"""Plans the sharding of embedding tables: options, bound, search, and the reason why it is no better."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lakh.errors import InfeasiblePlan
from lakh.planner.embedding.bound import base_ms, lower_bound_ms
from lakh.planner.embedding.cost_model import BandwidthCosts
from lakh.planner.embedding.milp import num_variables, solve_milp
from lakh.planner.embedding.options import EmbeddingCosts, ShardingLimits, ShardingOption
from lakh.planner.embedding.placement import Placement
from lakh.planner.embedding.search import split_search
from lakh.spec.embedding import EmbeddingPlan, EmbeddingShard, EmbeddingTable, check_plan

__all__ = ["BindingShard", "ShardingResult", "plan_sharding"]

SMALL_SET = 500  # tables up to which ruin and recreate pays; with more, LPT is within 0.1 % of the bound
SEARCH_ROUNDS = 100_000  # up to SEARCH_TABLES tables; fewer with more, whose rounds take longer
SEARCH_TABLES = 30
SEARCH_STARTS = 4
MILP_VARIABLES = 6000
MILP_GAP = 1e-3  # a plan closer to its bound is not worth a solver


@dataclass(frozen=True, slots=True)
class BindingShard:
    """The shard that decides the slowest rank, and why the plan is no faster."""

    rank: int
    table: str
    shard_ms: float
    reason: str


@dataclass(frozen=True, slots=True)
class ShardingResult:
    plan: EmbeddingPlan
    bottleneck_ms: float
    lower_bound_ms: float
    engine: str
    binds: BindingShard
    seconds: float
    cost_model: str

    @property
    def gap(self) -> float:
        """How much slower the plan is than its lower bound, as a share of the bound."""
        return self.bottleneck_ms / self.lower_bound_ms - 1 if self.lower_bound_ms else 0.0


def plan_sharding(
    tables: Sequence[EmbeddingTable], costs: EmbeddingCosts, limits: ShardingLimits, *, milp_time_s: float = 0.0
) -> ShardingResult:
    """The best plan found, its bound and what binds. InfeasiblePlan says which table or memory stands in the way."""
    began = time.perf_counter()
    options = [_options(table, costs, limits) for table in tables]
    if isinstance(costs, BandwidthCosts):
        _check_total_memory(tables, limits)
    placement, engine = _search(options, limits)
    if placement is None and isinstance(costs, BandwidthCosts):
        slower = [costs.slower_options(table) for table in tables]
        placement, engine = _search_tiers(tables, options, slower, limits)
        options = [fast + slow for fast, slow in zip(options, slower, strict=True)]
    if placement is None:
        found = f"{len(tables)} tables do not fit into {limits.ranks} ranks with {_sizes(limits)} each"
        raise InfeasiblePlan("tables", found, "use more ranks, more memory per rank, or a host or file tier")
    bound = lower_bound_ms(options, limits, placement.bottleneck_ms)
    if len(tables) <= SMALL_SET and bound > 0:
        better = _improve(options, placement, bound)
        if better.bottleneck_ms < placement.bottleneck_ms:
            placement, engine = better, "ruin and recreate"
    gap = placement.bottleneck_ms / bound - 1 if bound else 0.0
    if milp_time_s > 0 and gap > MILP_GAP and num_variables(options, limits) <= MILP_VARIABLES:
        answer = solve_milp(options, limits, placement.bottleneck_ms, milp_time_s)
        if answer.placement is not None and answer.placement.bottleneck_ms < placement.bottleneck_ms:
            placement, engine = answer.placement, "MILP (HiGHS)"
        if answer.bound_ms is not None:
            bound = min(max(bound, answer.bound_ms), placement.bottleneck_ms)
    plan = EmbeddingPlan(limits.ranks, limits.node_size, tuple(_shards(tables, placement)))
    check_plan(plan, tables)
    bottleneck = max(plan.rank_ms())
    return ShardingResult(
        plan=plan,
        bottleneck_ms=bottleneck,
        lower_bound_ms=min(bound, bottleneck),
        engine=engine,
        binds=_binding(plan, options, tables, limits, bound),
        seconds=time.perf_counter() - began,
        cost_model=costs.name,
    )


def _search(options: Sequence[Sequence[ShardingOption]], limits: ShardingLimits) -> tuple[Placement | None, str]:
    first = lower_bound_ms(options, limits, sum(max(o.largest_ms for o in of_table) for of_table in options))
    return split_search(options, limits, first)


def _improve(options: Sequence[Sequence[ShardingOption]], placement: Placement, bound_ms: float) -> Placement:
    if importlib.util.find_spec("numba") is None:  # the [plan] extra
        return placement
    from lakh.planner.embedding.ruin_recreate import ruin_and_recreate

    rounds = max(1, SEARCH_ROUNDS * min(SEARCH_TABLES, len(options)) // len(options))
    found = [ruin_and_recreate(options, placement, bound_ms, rounds=rounds, seed=seed) for seed in range(SEARCH_STARTS)]
    return min(found, key=lambda one: one.bottleneck_ms)


def _search_tiers(
    tables: Sequence[EmbeddingTable],
    options: Sequence[list[ShardingOption]],
    slower: Sequence[list[ShardingOption]],
    limits: ShardingLimits,
) -> tuple[Placement | None, str]:
    """Move the tables with the fewest lookups per byte out of the device, as few as are needed for the rest to fit."""
    movable = [index for index, found in enumerate(slower) if found]
    movable.sort(key=lambda i: tables[i].pooling * tables[i].features / tables[i].rows)
    best: tuple[Placement | None, str] = (None, "")
    low, high = 1, len(movable)
    while low <= high:
        count = (low + high) // 2
        moved = set(movable[:count])
        placed = _search([slower[i] if i in moved else options[i] for i in range(len(tables))], limits)
        if placed[0] is None:
            low = count + 1
        else:
            best, high = placed, count - 1
    return best


def _options(table: EmbeddingTable, costs: EmbeddingCosts, limits: ShardingLimits) -> list[ShardingOption]:
    found = costs.options(table)
    if not found:
        size = table.bytes_of(table.rows, table.width) / 2**30
        where = f"table {table.name}"
        what = f"{size:,.1f} GiB do not fit, however they are split: {limits.ranks} ranks with {_sizes(limits)} each"
        raise InfeasiblePlan(where, what, "use more ranks, more memory per rank, or a host or file tier")
    return found


def _check_total_memory(tables: Sequence[EmbeddingTable], limits: ShardingLimits) -> None:
    """Refuse early a set that is larger than all memory together."""
    total = sum(table.bytes_of(table.rows, table.width) for table in tables)
    there = sum(limits.tier_bytes.values()) * limits.ranks
    if total > there:
        found = f"{total / 2**30:,.1f} GiB, all ranks together have {there / 2**30:,.1f} GiB for tables"
        raise InfeasiblePlan("tables", found, "use more ranks, more memory per rank, or a host or file tier")


def _sizes(limits: ShardingLimits) -> str:
    return ", ".join(f"{size / 2**30:,.1f} GiB of {tier}" for tier, size in limits.tier_bytes.items() if size)


def _shards(tables: Sequence[EmbeddingTable], placement: Placement) -> list[EmbeddingShard]:
    limits = placement.limits
    shards = []
    for table, option, homes in zip(tables, placement.chosen, placement.homes, strict=True):
        first = 0
        for index, width in enumerate(option.widths):
            template = EmbeddingShard(
                table=table.name,
                kind=option.kind,
                tier=option.tier,
                rank=0,
                rows=(0, table.rows),
                columns=(first, first + width),
                cost_ms=option.slice_ms[index],
                bytes=option.slice_bytes[index],
            )
            first += width
            if option.reach == "rank":
                shards.append(replace(template, rank=homes[index]))
                continue
            node = limits.node_size
            ranks = range(limits.ranks) if option.reach == "all" else range(homes[0] * node, (homes[0] + 1) * node)
            block = -(-table.rows // len(ranks))  # rows of a rank; the last ranks of a short table have none
            for place, rank in enumerate(ranks):
                rows = (min(place * block, table.rows), min((place + 1) * block, table.rows))
                shards.append(
                    replace(template, rank=rank, rows=(0, table.rows) if option.kind == "data-parallel" else rows)
                )
    return shards


def _binding(
    plan: EmbeddingPlan,
    options: Sequence[Sequence[ShardingOption]],
    tables: Sequence[EmbeddingTable],
    limits: ShardingLimits,
    bound_ms: float,
) -> BindingShard:
    loads = plan.rank_ms()
    rank = max(range(plan.ranks), key=loads.__getitem__)
    index = {table.name: number for number, table in enumerate(tables)}
    base = base_ms(options)
    own = [shard for shard in plan.of_rank(rank) if any(o.reach != "all" for o in options[index[shard.table]])]
    shard = max(own or plan.of_rank(rank), key=lambda s: s.cost_ms)
    shortest = min(option.largest_ms for option in options[index[shard.table]])
    width = shard.columns[1] - shard.columns[0]
    spread = f" on top of {base:,.4g} ms that every rank spends on tables spread over all ranks" if base and own else ""
    piece = f"{shard.kind} piece of {shard.table}, {width} columns wide, takes {shard.cost_ms:,.4g} ms{spread}"
    if base + shortest >= loads[rank] * (1 - 1e-6):
        reason = f"a {piece}, alone on rank {rank}; slices narrower than {limits.min_width} columns are not allowed"
        if limits.min_width <= 4:
            reason = f"a {piece}, alone on rank {rank}; it cannot be split further"
    elif loads[rank] <= bound_ms * 1.002:
        reason = f"the work is balanced: the ranks' mean is {sum(loads) / len(loads):,.4g} ms; less work, not another "
        reason += f"placement, would be faster (largest on rank {rank}: a {piece})"
    else:
        reason = f"no better plan was found; a {piece} on rank {rank}, and no plan is below {bound_ms:,.4g} ms"
    return BindingShard(rank, shard.table, shard.cost_ms, reason)
