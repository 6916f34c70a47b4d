"""What the links between hosts carry, measured: latency and bandwidth of each tier, and which hosts are clearly slower.

The first group of a process that spans hosts measures once (tens of milliseconds on a fast network), and every later
group of the same ranks uses the figures; they are also kept in a file, so that the next start does not measure again. A
tier's bandwidth is that of one of its groups to the outside: all hosts of two racks talk at once to find a trunk's. A
topology file's word on tiers and on a host's cable is believed; cables of which it says nothing are measured (who
talks to whom, and what follows: `cables.py`).

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
from dataclasses import dataclass, replace

import numpy as np

from lakh import storage
from lakh.c3 import cables, native
from lakh.c3.group import Group
from lakh.c3.topology import TIERS, Link, Topology
from lakh.errors import LakhError

__all__ = ["Network", "learn_network", "measured_network", "probes", "to_links", "with_network"]

ROUNDS = 9
BULK_BYTES = 2 << 20
CONFIRMATIONS = 2
"""Times that a slow host must show itself again: a busy moment looks the same."""
CABLE_BYTES, OPENING_BYTES = 1 << 20, 128 << 10
"""Of a host's cable: what is timed, and what goes before it, which opens the connection and its window."""
TAG = 0x6C696E6B
KEPT_S = 24 * 3600.0
"""How long a file's figures are believed."""


@dataclass(frozen=True)
class Network:
    """What was found out."""

    links: Mapping[str, Link]
    """Of each tier that was measured."""
    slow: Mapping[str, float]
    """Bytes per second of the hosts whose cables are clearly slower than the others', by the names of the topology."""
    reason: str = ""


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


def measured_network(group: Group, cache: str | None = None) -> Network:
    """What a group that spans hosts finds out of its network; all ranks call it and get the same.

    `cache` is a folder; None: the user's.
    """
    topology = group.topology
    plan = {} if topology.links else probes(topology)
    meetings = cables.rounds(topology)
    if not plan and not meetings:
        return Network({}, {})
    folder = cache if cache is not None else str(storage.cache_folder("c3"))
    file = storage.join(folder, f"links-{_digest(topology)}.json")
    tiers, rates = np.zeros(2 * len(TIERS)), np.zeros(topology.size)
    figures = np.concatenate([tiers, rates])
    if group.rank == 0:
        figures = _read(file, figures.size)
    _reduce(group, figures)
    if not figures.any():
        for number, tier in enumerate(TIERS):
            if tier in plan:
                tiers[2 * number : 2 * number + 2] = _probe(group, plan[tier])
        rates = _cable_rates(group, meetings)
        for _ in range(CONFIRMATIONS):
            if cables.judge(topology.hosts, rates.tolist()).slow:
                rates = np.maximum(rates, _cable_rates(group, meetings))
        figures = np.concatenate([tiers, rates])
        _reduce(group, figures)
        if group.rank == 0:
            _keep(file, figures)
    tiers, rates = figures[: 2 * len(TIERS)], figures[2 * len(TIERS) :]
    found = cables.judge(topology.hosts, rates.tolist())
    one_way_us = {tier: float(tiers[2 * number]) for number, tier in enumerate(TIERS) if tier in plan}
    carries = {
        tier: len(plan[tier]) * BULK_BYTES / max(1e-9, float(tiers[2 * number + 1]))
        for number, tier in enumerate(TIERS)
        if tier in plan
    }
    if found.typical and "host" in carries:
        carries["host"] = found.typical  # of many hosts, not of two that may be the slow ones
    return Network(to_links(one_way_us, carries), found.slow, found.reason)


def with_network(topology: Topology, network: Network) -> tuple[Topology, Mapping[str, Link]]:
    """What a group believes: the file where it speaks, and what was measured where it is silent."""
    told = set(topology.cables) - topology.measured
    measured = {host: rate for host, rate in network.slow.items() if host in topology.hosts and host not in told}
    believed = {host: rate for host, rate in topology.cables.items() if host in told}
    known = replace(topology, cables={**believed, **measured}, measured=frozenset(measured))
    return known, {} if topology.links else network.links


def learn_network(group: Group) -> None:
    """Let a group that spans hosts choose by what its network carries.

    The figures are those of an earlier group where all ranks have the same ones, and are measured now where not.
    """
    global _remembered
    mark = int(hashlib.sha256(repr(_remembered).encode()).hexdigest()[:12], 16) if _remembered else 0
    marks = np.array([mark, -mark], dtype=np.float64)  # of 48 bits: exact
    _reduce(group, marks)
    if mark == 0 or marks[0] != -marks[1]:
        _remembered = measured_network(group)
    assert _remembered is not None
    group.know(*with_network(group.topology, _remembered))


_remembered: Network | None = None
"""Of this process."""


def _cable_rates(group: Group, meetings: list[list[tuple[int, int]]]) -> np.ndarray:
    """The best bytes per second that each rank has reached with those that it met; the same on all ranks."""
    rates = np.zeros(group.size)
    opening, data = ctypes.create_string_buffer(OPENING_BYTES), ctypes.create_string_buffer(CABLE_BYTES)
    for pairs in meetings:
        mine = next((pair for pair in pairs if group.rank in pair), None)
        if mine is not None:
            _there_and_back(group, mine, opening)
        group.run("barrier", native.DTYPES["u8"], -1, -1, 0, 0, 0)
        if mine is not None:
            seconds = _there_and_back(group, mine, data)
            if group.rank == mine[0]:  # whose time holds both ways; the other's send ends when the kernel has it
                rate = 2 * CABLE_BYTES / max(1e-9, seconds)
                rates[list(mine)] = np.maximum(rates[list(mine)], rate)
        group.run("barrier", native.DTYPES["u8"], -1, -1, 0, 0, 0)
    _reduce(group, rates)
    return rates


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
    known = [topology.places, topology.digest, os.environ.get("MASTER_ADDR", "")]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def _read(file: str, size: int) -> np.ndarray:
    """What was measured not long ago; zeros where nothing was."""
    try:
        kept = json.loads(storage.read_bytes(file))
        figures = np.array(kept["figures"], dtype=np.float64)
        if 0 <= time.time() - kept["time_s"] < KEPT_S and figures.shape == (size,):
            return figures
    except (LakhError, OSError, ValueError, KeyError, TypeError):
        pass
    return np.zeros(size)


def _keep(file: str, figures: np.ndarray) -> None:
    try:
        storage.write_bytes(file, json.dumps({"time_s": time.time(), "figures": figures.tolist()}).encode())
    except (LakhError, OSError):  # without a cache the next start measures again
        return
