"""Routing: send a request to the replica that has its file in the prefix cache, unless that replica is overloaded.

Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016): each name has many points on a ring, a
key belongs to the next name clockwise, and a replica with more than SLACK times its fair share passes the key on to the
next one. A replica that joins or leaves moves only its own keys. The caller may remember where a key went
(`preferred`), because its cached prefix is there.

Pure functions of names and numbers: all gateways with the same list decide alike.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

__all__ = ["HashRing", "RouteDecision", "choose_replica"]

POINTS = 64  # per name; the shares of two names then differ by about 12 %
SLACK = 1.25


class RouteDecision(NamedTuple):
    name: str
    reason: str


class HashRing:
    def __init__(self, names: Iterable[str], points: int = POINTS) -> None:
        self._names = sorted(set(names))
        places = sorted((_place(f"{name}#{number}"), name) for name in self._names for number in range(points))
        self._places = [place for place, _ in places]
        self._owners = [name for _, name in places]

    def names_from(self, key: str) -> Iterator[str]:
        """All names in ring order, the key's own first."""
        seen: set[str] = set()
        start = bisect.bisect_right(self._places, _place(key))
        for index in range(len(self._owners)):
            name = self._owners[(start + index) % len(self._owners)]
            if name not in seen:
                seen.add(name)
                yield name
            if len(seen) == len(self._names):
                return


def choose_replica(
    ring: HashRing, key: str, loads: Mapping[str, int], preferred: str | None = None
) -> RouteDecision | None:
    """`loads`: running requests of the usable replicas. None if there are none."""
    if not loads:
        return None
    bound = math.ceil(SLACK * (sum(loads.values()) + 1) / len(loads))
    if preferred is not None and loads.get(preferred, bound) < bound:
        return RouteDecision(preferred, "it served this file before")
    passed: list[str] = []
    for name in ring.names_from(key):
        if name not in loads:
            continue
        if loads[name] < bound:
            return RouteDecision(
                name, f"next on the ring after {', '.join(passed)} (full)" if passed else "first on the ring"
            )
        passed.append(name)
    least = min(loads, key=lambda name: (loads[name], name))  # names that are not on the ring
    return RouteDecision(least, "least loaded")


def _place(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
