"""Measures the links between hosts: latency and bandwidth of each tier, and which hosts are much slower.

The first group of a process that spans hosts measures once (tens of milliseconds on a fast network); later groups of
the same ranks reuse the result, and a cache file keeps it for the next start. A tier's bandwidth is that of one of its
groups to the outside: to measure a rack's trunk, all hosts of two racks communicate concurrently. Rates in a topology
file take precedence; only what the file leaves out is measured.

All ranks end with the same figures, so that all choose the same algorithm. Fails like messages: PeerLost, PeerTimeout.
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
from lakh.c3 import native
from lakh.c3.group import CommGroup
from lakh.c3.network.slow_hosts import find_slow_hosts, probe_rounds
from lakh.c3.topology import TIERS, Link, Topology
from lakh.errors import LakhError

__all__ = [
    "MeasuredNetwork",
    "apply_measured_network",
    "links_from_measurements",
    "measure_network",
    "merge_network",
    "probe_pairs",
]

LATENCY_ROUNDS = 9
BULK_BYTES = 2 << 20
CONFIRMATIONS = 2
"""Repetitions that must confirm a slow host, since a moment of load looks the same."""
HOST_BYTES, WARMUP_BYTES = 1 << 20, 128 << 10
"""Of a host's link: the timed transfer, and the one before it that opens the connection and its window."""
TAG = 0x6C696E6B
CACHE_S = 24 * 3600.0


@dataclass(frozen=True)
class MeasuredNetwork:
    links: Mapping[str, Link]
    """By tier."""
    slow: Mapping[str, float]
    """Bytes per second of hosts that are much slower than the others, by the names in the topology."""
    reason: str = ""


def probe_pairs(topology: Topology) -> dict[str, list[tuple[int, int]]]:
    """For each tier, the pairs of ranks that communicate concurrently: one rank of each host of two groups."""
    pairs: dict[str, list[tuple[int, int]]] = {}
    for number, tier in enumerate(TIERS):
        groups: dict[tuple[str, ...], list[int]] = {}
        for rank in topology.first_of_hosts:
            groups.setdefault(topology.places[rank][number:], []).append(rank)
        members = list(groups.values())
        # Two groups of this tier inside one group of the next, so that no outer link is crossed.
        for index, ranks in enumerate(members):
            other = next((o for o in members[index + 1 :] if topology.distance(ranks[0], o[0]) == tier), None)
            if other is not None:
                pairs[tier] = list(zip(ranks, other, strict=False))
                break
    return pairs


def links_from_measurements(one_way_us: Mapping[str, float], bytes_per_s: Mapping[str, float]) -> dict[str, Link]:
    """Links from measurements across each tier: the latency of an outer tier includes that of the inner ones."""
    links: dict[str, Link] = {}
    inner_us = 0.0
    for tier in TIERS:
        if tier in one_way_us:
            links[tier] = Link(bytes_per_s[tier], max(0.0, one_way_us[tier] - inner_us))
            inner_us = max(inner_us, one_way_us[tier])
    return links


def measure_network(group: CommGroup, cache: str | None = None) -> MeasuredNetwork:
    """Measure the network of a group that spans hosts. All ranks call it and get the same result.

    `cache` is a folder; None is the user's cache folder.
    """
    topology = group.topology
    tier_pairs = {} if topology.links else probe_pairs(topology)
    rounds = probe_rounds(topology)
    if not tier_pairs and not rounds:
        return MeasuredNetwork({}, {})
    folder = cache if cache is not None else str(storage.cache_folder("c3"))
    file = storage.join(folder, f"links-{_digest(topology)}.json")
    # (one-way microseconds, seconds of the bulk transfer) of each tier, then the bytes per second of each rank.
    figures = np.zeros(2 * len(TIERS) + topology.size)
    if group.rank == 0:
        figures = _read_cache(file, figures.size)
    _max_over_ranks(group, figures)
    if not figures.any():
        tiers = [_measure_tier(group, tier_pairs[tier]) if tier in tier_pairs else (0.0, 0.0) for tier in TIERS]
        rates = _measure_hosts(group, rounds)
        for _ in range(CONFIRMATIONS):
            if find_slow_hosts(topology.hosts, rates.tolist()).slow:
                rates = np.maximum(rates, _measure_hosts(group, rounds))
        figures = np.concatenate([np.ravel(tiers), rates])
        _max_over_ranks(group, figures)
        if group.rank == 0:
            _write_cache(file, figures)
    found = find_slow_hosts(topology.hosts, figures[2 * len(TIERS) :].tolist())
    one_way_us: dict[str, float] = {}
    bytes_per_s: dict[str, float] = {}
    for tier, (latency_us, bulk_s) in zip(TIERS, figures[: 2 * len(TIERS)].reshape(-1, 2).tolist(), strict=True):
        if tier in tier_pairs:
            one_way_us[tier] = latency_us
            bytes_per_s[tier] = len(tier_pairs[tier]) * BULK_BYTES / max(1e-9, bulk_s)
    if found.typical and "host" in bytes_per_s:
        bytes_per_s["host"] = found.typical  # the median of many hosts; the probed pair may be slow
    return MeasuredNetwork(links_from_measurements(one_way_us, bytes_per_s), found.slow, found.reason)


def merge_network(topology: Topology, network: MeasuredNetwork) -> tuple[Topology, Mapping[str, Link]]:
    """The topology and links a group uses: the file's values, and measured ones where the file has none."""
    from_file = {host: rate for host, rate in topology.host_rates.items() if host not in topology.measured}
    measured = {host: rate for host, rate in network.slow.items() if host in topology.hosts and host not in from_file}
    merged = replace(topology, host_rates={**from_file, **measured}, measured=frozenset(measured))
    return merged, {} if topology.links else network.links


def apply_measured_network(group: CommGroup) -> None:
    """Make a group that spans hosts select algorithms by its measured network.

    Reuses the figures of an earlier group if all ranks have the same ones; otherwise measures.
    """
    global _last_measured
    mark = int(hashlib.sha256(repr(_last_measured).encode()).hexdigest()[:12], 16) if _last_measured else 0
    marks = np.array([mark, -mark], dtype=np.float64)  # 48 bits: exact
    _max_over_ranks(group, marks)
    if mark == 0 or marks[0] != -marks[1]:
        _last_measured = measure_network(group)
    assert _last_measured is not None
    group.set_network(*merge_network(group.topology, _last_measured))


_last_measured: MeasuredNetwork | None = None
"""Of this process."""


def _measure_hosts(group: CommGroup, rounds: list[list[tuple[int, int]]]) -> np.ndarray:
    """The best bytes per second of each rank over all rounds; equal on all ranks."""
    rates = np.zeros(group.size)
    warmup, data = ctypes.create_string_buffer(WARMUP_BYTES), ctypes.create_string_buffer(HOST_BYTES)
    for pairs in rounds:
        mine = next((pair for pair in pairs if group.rank in pair), None)
        if mine is not None:
            _round_trip(group, mine, warmup)
        _barrier(group)
        if mine is not None:
            seconds = _round_trip(group, mine, data)
            if group.rank == mine[0]:  # its time covers both ways; the other's send ends when the kernel has the data
                rate = 2 * HOST_BYTES / max(1e-9, seconds)
                rates[list(mine)] = np.maximum(rates[list(mine)], rate)
        _barrier(group)
    _max_over_ranks(group, rates)
    return rates


def _measure_tier(group: CommGroup, pairs: list[tuple[int, int]]) -> tuple[float, float]:
    """One-way microseconds of the first pair, and this rank's seconds for the bulk transfer; 0 on other ranks."""
    _barrier(group)
    mine = next((pair for pair in pairs if group.rank in pair), None)
    one_way_us = 0.0
    if mine == pairs[0]:
        small = ctypes.create_string_buffer(64)
        times = [_round_trip(group, mine, small) for _ in range(LATENCY_ROUNDS)]
        one_way_us = min(times) / 2 * 1e6
    if mine is not None:  # the first transfer opens the connection's window
        bulk = ctypes.create_string_buffer(BULK_BYTES)
        _round_trip(group, mine, bulk)
    _barrier(group)
    bulk_s = _round_trip(group, mine, bulk) / 2 if mine is not None else 0.0
    return one_way_us, bulk_s


def _round_trip(group: CommGroup, pair: tuple[int, int], data: ctypes.Array[ctypes.c_char]) -> float:
    address, size, peer = ctypes.addressof(data), len(data), pair[1] if group.rank == pair[0] else pair[0]
    began_s = time.perf_counter()
    for sender in pair:
        if sender == group.rank:
            ticket = group.send(peer, TAG, address, size)
        else:
            ticket, _ = group.recv(peer, TAG, address, size)
        group.wait_message(ticket, 60.0)
    return time.perf_counter() - began_s


def _barrier(group: CommGroup) -> None:
    group.run("barrier", native.DTYPES["u8"], -1, -1, 0, 0, 0)


def _max_over_ranks(group: CommGroup, figures: np.ndarray) -> None:
    address = figures.ctypes.data
    group.run("all_reduce", native.DTYPES["f64"], native.OPS["max"], -1, address, address, figures.size)


def _digest(topology: Topology) -> str:
    known = [topology.places, topology.digest, os.environ.get("MASTER_ADDR", "")]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def _read_cache(file: str, size: int) -> np.ndarray:
    """The cached figures; zeros if there are none or they are too old."""
    try:
        cached = json.loads(storage.read_bytes(file))
        figures = np.array(cached["figures"], dtype=np.float64)
        if 0 <= time.time() - cached["time_s"] < CACHE_S and figures.shape == (size,):
            return figures
    except (LakhError, OSError, ValueError, KeyError, TypeError):
        pass
    return np.zeros(size)


def _write_cache(file: str, figures: np.ndarray) -> None:
    try:
        storage.write_bytes(file, json.dumps({"time_s": time.time(), "figures": figures.tolist()}).encode())
    except (LakhError, OSError):  # without a cache the next start measures again
        return
