"""What the links between hosts carry, measured: latency and bandwidth of each tier, for the choice of algorithms.

The first group of a process that spans hosts and has no topology file with links measures them once (tens of
milliseconds on a fast network), and every later group of the same ranks uses the figures; they are also kept in a
file, so that the next start does not measure again. A tier's bandwidth is that of one of its groups to the outside: all
hosts of two racks talk at once to find a trunk's.

All ranks end with the same figures, so that all choose the same algorithm. Fails as messages fail: PeerLost,
PeerTimeout.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lakh import storage
from lakh.c3 import native
from lakh.c3.group import Group
from lakh.c3.topology import TIERS, Link, Topology
from lakh.errors import LakhError

__all__ = ["measured_links", "probes", "remembered_links", "to_links"]

ROUNDS = 9
BULK_BYTES = 2 << 20
TAG = 0x6C696E6B
KEPT_S = 24 * 3600.0
"""How long a file's figures are believed."""


def probes(topology: Topology) -> dict[str, list[tuple[int, int]]]:
    """For each tier that messages cross, the pairs of ranks that talk at once: one rank of each host of two groups."""
    first_of_host: dict[str, int] = {}
    for rank, host in enumerate(topology.hosts):
        first_of_host.setdefault(host, rank)
    found: dict[str, list[tuple[int, int]]] = {}
    for number, tier in enumerate(TIERS):
        groups: dict[tuple[str, ...], list[int]] = {}
        for rank in first_of_host.values():
            groups.setdefault(topology.places[rank][number:], []).append(rank)
        teams = list(groups.values())
        # Two groups of this tier that lie in one group of the next: nothing further out must be crossed.
        for index, team in enumerate(teams):
            other = next((t for t in teams[index + 1 :] if topology.distance(team[0], t[0]) == tier), None)
            if other is not None:
                found[tier] = list(zip(team, other, strict=False))
                break
    return found


def to_links(one_way_us: Mapping[str, float], bytes_per_s: Mapping[str, float]) -> dict[str, Link]:
    """Links from what was measured across each tier: an outer tier's latency contains that of the inner ones."""
    links: dict[str, Link] = {}
    inner_us = 0.0
    for tier in TIERS:
        if tier in one_way_us:
            links[tier] = Link(bytes_per_s[tier], max(0.0, one_way_us[tier] - inner_us))
            inner_us = max(inner_us, one_way_us[tier])
    return links


def measured_links(group: Group, cache: str | None = None) -> dict[str, Link]:
    """The links of a group that spans hosts, on every rank; all ranks call it. `cache`: a folder; None: the user's."""
    plan = probes(group.topology)
    if not plan:
        return {}
    folder = cache if cache is not None else str(Path.home() / ".cache" / "lakh" / "c3")
    file = storage.join(folder, f"links-{_digest(group.topology)}.json")
    figures = np.zeros(2 * len(TIERS))
    if group.rank == 0:
        figures = _read(file)
    _reduce(group, figures)
    if not figures.any():
        for number, tier in enumerate(TIERS):
            if tier in plan:
                figures[2 * number : 2 * number + 2] = _probe(group, plan[tier])
        _reduce(group, figures)
        if group.rank == 0:
            _keep(file, figures)
    one_way_us = {tier: float(figures[2 * number]) for number, tier in enumerate(TIERS) if tier in plan}
    rates = {
        tier: len(plan[tier]) * BULK_BYTES / max(1e-9, float(figures[2 * number + 1]))
        for number, tier in enumerate(TIERS)
        if tier in plan
    }
    return to_links(one_way_us, rates)


def remembered_links(group: Group) -> Mapping[str, Link]:
    """The figures of an earlier group, where all ranks of `group` have the same ones; measured now where not."""
    mark = int(hashlib.sha256(repr(sorted(_remembered.items())).encode()).hexdigest()[:12], 16) if _remembered else 0
    marks = np.array([mark, -mark], dtype=np.float64)  # of 48 bits: exact
    _reduce(group, marks)
    if mark == 0 or marks[0] != -marks[1]:
        _remembered.clear()
        _remembered.update(measured_links(group) or {"": Link(0.0)})
    return {tier: link for tier, link in _remembered.items() if tier}


_remembered: dict[str, Link] = {}
"""Of this process; an entry without a name where there was nothing to measure."""


def _probe(group: Group, pairs: list[tuple[int, int]]) -> tuple[float, float]:
    """One-way microseconds of the first pair, and the seconds that this rank's pair takes for the bulk; 0 elsewhere."""
    group.run("barrier", native.DTYPES["u8"], -1, -1, 0, 0, 0)
    mine = next((pair for pair in pairs if group.rank in pair), None)
    one_way_us = 0.0
    if mine == pairs[0]:
        small = ctypes.create_string_buffer(64)
        times = [_there_and_back(group, mine, small) for _ in range(ROUNDS)]
        one_way_us = min(times) / 2 * 1e6
    if mine is not None:  # the first transfer opens the connection's window
        bulk = ctypes.create_string_buffer(BULK_BYTES)
        _there_and_back(group, mine, bulk)
    group.run("barrier", native.DTYPES["u8"], -1, -1, 0, 0, 0)
    bulk_s = _there_and_back(group, mine, bulk) / 2 if mine is not None else 0.0
    return one_way_us, bulk_s


def _there_and_back(group: Group, pair: tuple[int, int], data: ctypes.Array[ctypes.c_char]) -> float:
    address, size, peer = ctypes.addressof(data), len(data), pair[1] if group.rank == pair[0] else pair[0]
    began_s = time.perf_counter()
    for sender in pair:
        if sender == group.rank:
            ticket = group.send(peer, TAG, address, size)
        else:
            ticket, _ = group.recv(peer, TAG, address, size)
        group.wait_message(ticket, 60.0)
    return time.perf_counter() - began_s


def _reduce(group: Group, figures: np.ndarray) -> None:
    address = figures.ctypes.data
    group.run("all_reduce", native.DTYPES["f64"], native.OPS["max"], -1, address, address, figures.size)


def _digest(topology: Topology) -> str:
    return hashlib.sha256(json.dumps([topology.places, os.environ.get("MASTER_ADDR", "")]).encode()).hexdigest()[:16]


def _read(file: str) -> np.ndarray:
    """What was measured not long ago; zeros where nothing was."""
    try:
        kept = json.loads(storage.read_bytes(file))
        figures = np.array(kept["figures"], dtype=np.float64)
        if 0 <= time.time() - kept["time_s"] < KEPT_S and figures.shape == (2 * len(TIERS),):
            return figures
    except (LakhError, OSError, ValueError, KeyError, TypeError):
        pass
    return np.zeros(2 * len(TIERS))


def _keep(file: str, figures: np.ndarray) -> None:
    try:
        storage.write_bytes(file, json.dumps({"time_s": time.time(), "figures": figures.tolist()}).encode())
    except (LakhError, OSError):  # without a cache the next start measures again
        return
