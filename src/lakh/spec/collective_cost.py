"""Cost of a collective in closed form: communication stages and bytes sent, for each tier of the network.

`collective_cost` gives for any number of ranks what `Schedule.num_stages` and `Schedule.bytes_sent` count on a built
schedule (a test compares the two), without building steps: the planner prices 100,000 ranks with it. Every number may
be a numpy array, so that one call prices many layouts.

Tiers are given as group sizes, innermost first: (8, 64) is 64 nodes of 8 ranks, (8, 16, 4) is 4 racks of 16 nodes.
Ranks are numbered node by node. Bytes, per rank and phase, for P ranks and a buffer of S bytes; all_reduce has two
phases (reduce-scatter, all-gather), the other operations one:

    flat              S/P to each of the P-1 peers                               1 stage
    ring              (P-1)/P * S to the right neighbour                         P-1 stages
    halving_doubling  S*d/P to the rank at distance d = P/2, P/4, ... 1           log2(P) stages, P a power of two
    hierarchical      per tier of g groups, (g-1)/g of S/(ranks inside a group)  1 stage per tier
    tree              broadcast, reduce: S for each child                        log2(P) stages
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lakh.errors import UserError

__all__ = ["CollectiveCost", "TierCost", "collective_cost"]

Number = Any
"""A float, or a numpy array of them."""

PHASES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "broadcast": 1, "reduce": 1}
COST_ALGORITHMS = ("flat", "ring", "halving_doubling", "hierarchical", "tree")


@dataclass(frozen=True)
class TierCost:
    """One rank's traffic to peers whose innermost common group is a group of this tier."""

    stages: Number
    """Stages whose farthest message crosses this tier."""
    bytes_sent: Number
    """Mean over the ranks. A group of this tier's inner groups sends this times its ranks."""


@dataclass(frozen=True)
class CollectiveCost:
    """Innermost tier first, as the sizes were given."""

    tiers: tuple[TierCost, ...]

    @property
    def stages(self) -> Number:
        return sum(tier.stages for tier in self.tiers)

    @property
    def bytes_sent(self) -> Number:
        return sum(tier.bytes_sent for tier in self.tiers)


def collective_cost(operation: str, algorithm: str, size_bytes: Number, tiers: Sequence[Number]) -> CollectiveCost:
    """Cost of one `operation` over ranks placed in `tiers`.

    `size_bytes` is the whole buffer: for all_gather the gathered result, for reduce_scatter the input, for all_to_all
    all that one rank sends, including its own part.
    """
    if operation not in PHASES or algorithm not in COST_ALGORITHMS:
        todo = f"choose an operation from {', '.join(PHASES)} and an algorithm from {', '.join(COST_ALGORITHMS)}"
        raise UserError(f"cost of {operation} by {algorithm}", "is not known", todo)
    phases = PHASES[operation]
    inside: list[Number] = [1]  # ranks in a group of the tiers below
    for groups in tiers:
        inside.append(inside[-1] * groups)
    ranks = inside[-1]
    costs = []
    for groups, inner, outer in zip(tiers, inside, inside[1:], strict=False):
        is_outermost_used = (groups > 1) * (outer == ranks)
        stages: Number = groups > 1
        if algorithm == "hierarchical":
            sent = (groups - 1) / groups * size_bytes / inner
        elif algorithm == "ring":
            # Of the ring's edges, one leaves each group; with a single group none does.
            inner_edges, outer_edges = ranks / inner, ranks / outer
            crossing = inner_edges * (inner_edges > 1) - outer_edges * (outer_edges > 1)
            sent = (ranks - 1) / ranks * size_bytes * crossing / ranks
            stages = is_outermost_used * (ranks - 1)
        else:
            sent = (outer - inner) / ranks * size_bytes
            stages = is_outermost_used if algorithm == "flat" else _log2(groups)
        costs.append(TierCost(phases * stages, phases * sent))
    return CollectiveCost(tuple(costs))


def _log2(value: Number) -> Number:
    if isinstance(value, int | float):
        return math.log2(value)
    import numpy as np

    return np.log2(value)
