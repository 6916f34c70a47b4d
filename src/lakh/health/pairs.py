"""Pairwise tests of a network: which pairs meet in which round, and which rank is at fault. Pure.

Every rank exchanges data with every other one, one partner in each round, so that a slow or corrupting link or device
shows in all pairs of one rank and not in those of the others.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PairResult", "find_faulty_ranks", "pair_rounds"]

SLOW_RATIO = 0.7
"""A rank is slow if the median bandwidth of its pairs is below this share of the median of all pairs."""


@dataclass(frozen=True)
class PairResult:
    first: int
    second: int
    GBps: float
    is_right: bool
    """Whether the sums were right."""


def pair_rounds(ranks: int) -> list[list[tuple[int, int]]]:
    """Rounds in which each rank has at most one partner; together they hold every pair once (the circle method)."""
    places: list[int | None] = [*range(ranks), *([None] if ranks % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def find_faulty_ranks(results: Sequence[PairResult]) -> dict[int, str]:
    """The ranks at fault, and why. With wrong sums, the ranks that occur in the most wrong pairs."""
    faulty: dict[int, str] = {}
    wrong = Counter(rank for result in results if not result.is_right for rank in (result.first, result.second))
    if wrong:
        most = max(wrong.values())
        faulty |= {rank: f"{count} pairs had wrong sums" for rank, count in wrong.items() if count == most}
    typical = statistics.median([result.GBps for result in results]) if results else 0.0
    ranks = sorted({rank for result in results for rank in (result.first, result.second)})
    for rank in ranks:
        own = statistics.median([result.GBps for result in results if rank in (result.first, result.second)])
        if len(ranks) > 2 and own < SLOW_RATIO * typical:
            faulty.setdefault(rank, f"{own:.3g} GB/s, and {typical:.3g} GB/s is typical")
    return faulty
