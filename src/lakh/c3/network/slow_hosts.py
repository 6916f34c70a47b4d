"""Finding hosts whose network link is much slower than the others'. Pure functions; links.py measures.

A transfer between two hosts is limited by the slower of their links, so a single transfer says little about either. In
a few rounds each host exchanges data with a different peer, all pairs concurrently; the best rate a host reaches is the
rate of its link, because only a slow link is slow with every peer. This takes the same time for 3 hosts and for 3000.

Only hosts behind one switch (one rack) are compared, and only if there are at least three: between two hosts the slow
one cannot be identified.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lakh.c3.topology import Topology

__all__ = ["SLOW_FRACTION", "SlowHosts", "find_slow_hosts", "probe_rounds"]

ROUNDS = 3
"""A host that meets only slow hosts in all rounds is classified as slow; rare when few hosts are slow."""
SLOW_FRACTION = 0.5
"""Hosts below this fraction of the median rate are slow. Smaller differences are noise on a shared network."""


@dataclass(frozen=True)
class SlowHosts:
    typical: float
    """Median bytes per second; 0 if no hosts could be compared."""
    slow: Mapping[str, float]
    """Bytes per second of the slow hosts, by the names in `Topology.hosts`."""
    reason: str


def probe_rounds(topology: Topology) -> list[list[tuple[int, int]]]:
    """For each round, the pairs of ranks that exchange data concurrently: one rank per host, a new peer every time."""
    racks: dict[tuple[str, ...], list[int]] = {}
    for rank in topology.first_of_hosts:
        racks.setdefault(topology.places[rank][1:], []).append(rank)
    rounds: list[list[tuple[int, int]]] = [[] for _ in range(ROUNDS)]
    for ranks in racks.values():
        if len(ranks) < 3:
            continue
        # Round-robin tournament: the first entry is fixed, the others rotate by one per round, so no pair meets twice.
        # With an odd number the first entry is None, and its opponent pauses.
        entries: list[int | None] = [*([None] if len(ranks) % 2 else []), *ranks]
        for number in range(min(ROUNDS, len(entries) - 1)):
            rotated = [entries[0], *entries[1 + number :], *entries[1 : 1 + number]]
            half = len(rotated) // 2
            for a, b in zip(rotated[:half], reversed(rotated[half:]), strict=True):
                if a is not None and b is not None:
                    rounds[number].append((min(a, b), max(a, b)))
    return [pairs for pairs in rounds if pairs]


def find_slow_hosts(hosts: Sequence[str], bytes_per_s: Sequence[float]) -> SlowHosts:
    """The slow hosts, from the best rate of each rank; 0 for ranks that were not measured."""
    best: dict[str, float] = {}
    for host, rate in zip(hosts, bytes_per_s, strict=True):
        best[host] = max(best.get(host, 0.0), rate)
    measured = {host: rate for host, rate in best.items() if rate > 0}
    if len(measured) < 3:
        return SlowHosts(0.0, {}, "fewer than three hosts in one rack: nothing to compare")
    typical = statistics.median_high(measured.values())
    slow = {host: rate for host, rate in measured.items() if rate < SLOW_FRACTION * typical}
    median = f"the median host's {typical / 1e6:.3g} MB/s"
    if not slow:
        return SlowHosts(typical, {}, f"all {len(measured)} hosts reach at least {SLOW_FRACTION:g} of {median}")
    listed = ", ".join(f"{host.rpartition('/')[2]} {rate / 1e6:.3g} MB/s" for host, rate in sorted(slow.items()))
    return SlowHosts(typical, slow, f"slow hosts: {listed}, compared with {median}")
