"""Finding slow ranks and links from the bandwidth between every two ranks. Pure; `--find-slow` measures."""

from __future__ import annotations

import statistics
from typing import Any

from lakh.c3.topology import Topology

__all__ = ["find_slow_ranks"]

SLOW_FRACTION = 0.5
"""A pair below this fraction of the median is slow."""
MIN_PAIRS = 3
"""At least this many pairs must cross the same tier to be compared."""


def find_slow_ranks(
    pairs: dict[tuple[int, ...], float], ranks: int, topology: Topology | None = None
) -> dict[str, Any]:
    """The slow ranks and links, with the reason, from GB/s between every two ranks.

    Pairs are compared with pairs that cross the same tier, since links between racks are slower by design. A rank is
    slow if more than half of its links are; a slow link between two ranks that are otherwise fast is a slow link.
    """
    by_tier: dict[str, list[tuple[int, ...]]] = {}
    for pair in pairs:
        by_tier.setdefault(topology.distance(*pair) if topology else "", []).append(pair)
    medians = {
        pair: statistics.median(pairs[other] for other in group)
        for group in by_tier.values()
        if len(group) >= MIN_PAIRS
        for pair in group
    }
    if not medians:
        found = f"fewer than {MIN_PAIRS} comparable pairs: nothing to compare"
        return {"ranks": [], "links": [], "reason": found}
    slow = {pair for pair, median in medians.items() if pairs[pair] < SLOW_FRACTION * median}
    of_rank = {rank: [pair for pair in medians if rank in pair] for rank in range(ranks)}
    bad = {rank: [pair for pair in mine if pair in slow] for rank, mine in of_rank.items()}
    bad_ranks = [rank for rank in range(ranks) if 2 * len(bad[rank]) > len(of_rank[rank])]
    bad_links = [list(pair) for pair in sorted(slow) if not any(rank in bad_ranks for rank in pair)]
    parts = [
        f"rank {rank}: {len(bad[rank])} of its {len(of_rank[rank])} links are below half of the median"
        for rank in bad_ranks
    ]
    parts += [f"link {a}-{b}: {pairs[(a, b)]:.3g} GB/s, median {medians[(a, b)]:.3g}" for a, b in bad_links]
    rates = ", ".join(f"{rate:.3g}" for rate in sorted(set(medians.values())))
    fine = f"all {len(medians)} pairs reach at least {SLOW_FRACTION:g} of the median of their tier ({rates} GB/s)"
    return {"ranks": bad_ranks, "links": bad_links, "reason": "; ".join(parts) or fine}
