"""Routing: send a request to the replica that has its file in the prefix cache, unless that replica is overloaded.

Rendezvous hashing with bounded loads: a key ranks the replicas by a hash of key and name, and goes to the first one
that has less than SLACK times its fair share. A replica that joins or leaves moves only its own keys. The caller may
remember where a key went (`preferred`), because its cached prefix is there.

A pure function of names and numbers: all gateways with the same list decide alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["RouteDecision", "choose_replica"]

SLACK = 1.25


class RouteDecision(NamedTuple):
    name: str
    reason: str


def choose_replica(key: str, loads: Mapping[str, int], preferred: str | None = None) -> RouteDecision | None:
    """`loads`: running requests of the usable replicas. None if there are none."""
    if not loads:
        return None
    bound = math.ceil(SLACK * (sum(loads.values()) + 1) / len(loads))  # above the mean: some replica is below it
    if preferred is not None and loads.get(preferred, bound) < bound:
        return RouteDecision(preferred, "it served this file before")
    ranked = sorted(loads, key=lambda name: hashlib.sha256(f"{key}#{name}".encode("utf-8", "surrogatepass")).digest())
    at = next(at for at, name in enumerate(ranked) if loads[name] < bound)
    return RouteDecision(ranked[at], f"next after {', '.join(ranked[:at])} (full)" if at else "first by hash")
