"""A lower bound of the slowest rank's time, over every choice of options and every placement.

A time T is impossible if one of these fails; each is necessary for any plan, and each holds for all larger T once it
holds for one, so bisection finds the smallest T that passes:

1. some option of each table has no piece that takes longer than T on one rank;
2. the work of such options, the least for each table, fits into T on all ranks together;
3. there are no more pieces longer than T/2 than ranks: two of them on one rank would take longer than T.

Tables that can only be spread over all ranks take their time from every rank first. Memory limits and MILP bounds can
only raise the bound, never lower it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lakh.planner.embedding.options import ShardingLimits, ShardingOption

__all__ = ["base_ms", "lower_bound_ms"]

BISECTIONS = 50  # of an interval that starts below the slowest rank's time: far below a nanosecond


def base_ms(options: Sequence[Sequence[ShardingOption]]) -> float:
    """Time of every rank on tables that only have options on all ranks."""
    return sum(min(o.largest_ms for o in of_table) for of_table in options if _is_on_all_ranks(of_table))


def lower_bound_ms(options: Sequence[Sequence[ShardingOption]], limits: ShardingLimits, value_ms: float) -> float:
    """A bound for all plans from these options, of which one takes `value_ms`."""
    ranks, node = limits.ranks, limits.node_size
    base = base_ms(options)
    movable = [of_table for of_table in options if not _is_on_all_ranks(of_table)]
    if not movable:
        return base
    flat = [option for of_table in movable for option in of_table]
    starts = np.cumsum([0, *map(len, movable)])[:-1]
    work = np.array([option.work_ms(ranks, node) for option in flat])
    largest = np.array([option.largest_ms for option in flat])
    smallest = np.array([min(option.slice_ms) for option in flat])
    pieces = np.array([len(option.widths) * option.ranks_of_slice(ranks, node) for option in flat])
    spread = np.array([option.ranks_of_slice(ranks, node) for option in flat])

    def possible(time_ms: float) -> bool:
        allowed = largest <= time_ms
        least_work = np.minimum.reduceat(np.where(allowed, work, np.inf), starts).sum()
        if least_work > time_ms * ranks:
            return False
        half = time_ms / 2
        long = np.where(smallest > half, pieces, np.where(largest > half, spread, 0))
        return bool(np.minimum.reduceat(np.where(allowed, long, np.iinfo(np.int64).max // 2), starts).sum() <= ranks)

    low, high = 0.0, max(value_ms - base, 0.0)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return min(base + low, value_ms)  # rounding of the sum


def _is_on_all_ranks(options: Sequence[ShardingOption]) -> bool:
    return all(option.reach == "all" for option in options)
