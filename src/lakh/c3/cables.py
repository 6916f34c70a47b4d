"""Which hosts' cables are clearly slower than the others': who talks to whom to find out, and what follows. Pure.

A message between two hosts is as fast as the slower of their cables, so one transfer tells little of either. In a few
rounds each host talks to another peer every time, all pairs at once; the best that a host reached is what its cable
carries, since only a slow cable is slow with everybody. That takes the same time for 3 hosts and for 3000.

Only hosts that a single switch connects (those of one rack) are compared, and only where there are three or more: two
cannot tell which of them it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lakh.c3.topology import Topology

__all__ = ["SLOW_SHARE", "Cables", "judge", "rounds"]

ROUNDS = 3
"""A host that meets only slow ones in all of them is taken for slow itself: with few slow hosts that is rare."""
SLOW_SHARE = 0.5
"""Of the typical host's rate; below it a host counts as slow. Less than that is noise on a shared network."""


@dataclass(frozen=True)
class Cables:
    """The answer and the reason."""

    typical: float
    """Bytes per second of the middle host; 0 where nothing could be compared."""
    slow: Mapping[str, float]
    """Bytes per second of the clearly slower ones, by the names of `Topology.hosts`."""
    reason: str


def rounds(topology: Topology) -> list[list[tuple[int, int]]]:
    """For each round the pairs of ranks that talk, all at once: one rank of each host, every time another peer."""
    first_of_host: dict[str, int] = {}
    for rank, host in enumerate(topology.hosts):
        first_of_host.setdefault(host, rank)
    racks: dict[tuple[str, ...], list[int]] = {}
    for rank in first_of_host.values():
        racks.setdefault(topology.places[rank][1:], []).append(rank)
    found: list[list[tuple[int, int]]] = [[] for _ in range(ROUNDS)]
    for team in racks.values():
        if len(team) < 3:
            continue
        # Everybody sits in a circle around the first and moves on by one seat a round: no pair meets twice. With an
        # odd number the seat of the first is empty, and whoever sits opposite rests.
        circle: list[int | None] = [*([None] if len(team) % 2 else []), *team]
        for number in range(min(ROUNDS, len(circle) - 1)):
            seats = [circle[0], *circle[1 + number :], *circle[1 : 1 + number]]
            for one, other in zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True):
                if one is not None and other is not None:
                    found[number].append((min(one, other), max(one, other)))
    return [pairs for pairs in found if pairs]


def judge(hosts: Sequence[str], bytes_per_s: Sequence[float]) -> Cables:
    """Which of the hosts are slow, from the best that the first rank of each has reached; 0 where it was not tried."""
    best: dict[str, float] = {}
    for host, rate in zip(hosts, bytes_per_s, strict=True):
        best[host] = max(best.get(host, 0.0), rate)
    tried = {host: rate for host, rate in best.items() if rate > 0}
    if len(tried) < 3:
        return Cables(0.0, {}, "fewer than three hosts of one rack: nothing to compare")
    typical = statistics.median_high(tried.values())
    slow = {host: rate for host, rate in tried.items() if rate < SLOW_SHARE * typical}
    others = f"{typical / 1e6:.3g} MB/s of the middle host"
    if not slow:
        return Cables(typical, {}, f"all {len(tried)} hosts reach at least {SLOW_SHARE:g} of the {others}")
    named = ", ".join(f"{host.rpartition('/')[2]} {rate / 1e6:.3g} MB/s" for host, rate in sorted(slow.items()))
    return Cables(typical, slow, f"slow hosts: {named}, beside {others}")
