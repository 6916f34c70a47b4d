"""Which rank or link is slow, from what every two ranks have sent each other. Pure; `--find-slow` measures."""

from __future__ import annotations

import statistics
from typing import Any

from lakh.c3.topology import Topology

__all__ = ["name_slow"]

SLOW_SHARE = 0.5
"""A pair below this share of the median is slow."""
ALIKE_PAIRS = 3
"""Fewer pairs that cross the same tier tell nothing of each other."""


def name_slow(pairs: dict[tuple[int, ...], float], ranks: int, topology: Topology | None = None) -> dict[str, Any]:
    """Which rank or link is slow, from GB/s between every two ranks; the culprit and the reason.

    Pairs are compared with those that cross the same tier: between racks less is no fault. A rank more than half of
    whose links are slow is slow itself; a slow link between two ranks that are fine elsewhere is a link.
    """
    alike: dict[str, list[tuple[int, ...]]] = {}
    for pair in pairs:
        alike.setdefault(topology.distance(*pair) if topology else "", []).append(pair)
    compared = {
        pair: statistics.median(pairs[other] for other in group)
        for group in alike.values()
        if len(group) >= ALIKE_PAIRS
        for pair in group
    }
    if not compared:
        found = f"fewer than {ALIKE_PAIRS} pairs are alike: nothing to compare"
        return {"ranks": [], "links": [], "reason": found}
    slow = {pair for pair, typical in compared.items() if pairs[pair] < SLOW_SHARE * typical}
    of_rank = {rank: [pair for pair in compared if rank in pair] for rank in range(ranks)}
    bad = {rank: [pair for pair in mine if pair in slow] for rank, mine in of_rank.items()}
    bad_ranks = [rank for rank in range(ranks) if 2 * len(bad[rank]) > len(of_rank[rank])]
    bad_links = [list(pair) for pair in sorted(slow) if not any(rank in bad_ranks for rank in pair)]
    parts = [
        f"rank {rank}: {len(bad[rank])} of its {len(of_rank[rank])} links are below half of what others reach"
        for rank in bad_ranks
    ]
    parts += [f"link {a}-{b}: {pairs[(a, b)]:.3g} GB/s where others reach {compared[(a, b)]:.3g}" for a, b in bad_links]
    rates = ", ".join(f"{rate:.3g}" for rate in sorted(set(compared.values())))
    fine = f"all {len(compared)} pairs reach at least {SLOW_SHARE:g} of the median of their like ({rates} GB/s)"
    return {"ranks": bad_ranks, "links": bad_links, "reason": "; ".join(parts) or fine}
