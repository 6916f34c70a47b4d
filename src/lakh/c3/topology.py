"""Network topology: the host, rack and zone of each rank, and the capacity of the links between them.

Detected (host identity; LAKH_C3_RACK and LAKH_C3_ZONE as labels from the scheduler) or read from a file:

    [[hosts]]
    name = "a"
    ranks = [0, 2]
    rack = "r0"                 # optional, as is zone
    Mbit_per_s = 200            # optional: this host's link, if it differs from links.host
    [links.host]                # capacity of one host's link; links.rack: one rack's trunk; links.zone
    Mbit_per_s = 800
    delay_us = 50
    [wire.zone]                 # transport of large messages between zones; also wire.host, wire.rack
    streams = 8                 # parallel connections; chunks are distributed over them
    chunk_KB = 1024
    in_flight_KB = 16384        # per connection

A file may describe one real host as several (an emulation). A file that describes several real hosts as one is refused
on all ranks. Independent of torch.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lakh.errors import UserError

__all__ = ["TIERS", "WIRES", "Link", "Topology", "Wire", "labels_from_environment", "numa_node", "read_topology"]

TIERS = ("host", "rack", "zone")


@dataclass(frozen=True)
class Link:
    bytes_per_s: float
    delay_us: float = 0.0


@dataclass(frozen=True)
class Wire:
    """Transport of large messages between two ranks: chunks distributed over several connections."""

    streams: int
    chunk_KB: int
    in_flight_KB: int
    """Per connection; the kernel may allow less (net.core.wmem_max, rmem_max)."""


# More distance, more connections with more data in flight: one connection reaches at most its window divided by the
# round-trip time, and a lost packet halves the window of its own connection only.
WIRES: Mapping[str, Wire] = {"host": Wire(2, 256, 4096), "rack": Wire(4, 256, 4096), "zone": Wire(8, 1024, 16384)}


@dataclass(frozen=True)
class Topology:
    places: tuple[tuple[str, ...], ...]
    """Host, rack and zone of each rank."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """Known capacity of the link from one group of a tier to the outside: "host", "rack", "zone"."""
    host_rates: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second of hosts whose link differs from links["host"], by the names in `hosts`."""
    digest: str = ""
    """Hash of the file; all ranks must have read the same one."""
    measured: frozenset[str] = frozenset()
    """Hosts in `host_rates` that were measured and not given by a file."""

    wires: Mapping[str, Wire] = field(default_factory=lambda: WIRES)
    """By the tier that a message crosses; equal on all ranks."""

    @property
    def size(self) -> int:
        return len(self.places)

    @property
    def hosts(self) -> list[str]:
        """Full name of each rank's host: zone/rack/host, since two racks may use the same host name."""
        return ["/".join(reversed(place)) for place in self.places]

    @property
    def host_numbers(self) -> list[int]:
        numbers: dict[str, int] = {}
        return [numbers.setdefault(host, len(numbers)) for host in self.hosts]

    @property
    def num_hosts(self) -> int:
        return len(set(self.hosts))

    @property
    def first_of_hosts(self) -> list[int]:
        """The first rank of each host."""
        first: dict[str, int] = {}
        for rank, host in enumerate(self.hosts):
            first.setdefault(host, rank)
        return list(first.values())

    def bytes_per_s(self, tier: str, group: str, links: Mapping[str, Link]) -> float:
        """Bandwidth of the link of one group of a tier."""
        return self.host_rates.get(group, links[tier].bytes_per_s) if tier == "host" else links[tier].bytes_per_s

    def rates(self, links: Mapping[str, Link]) -> tuple[float, ...] | None:
        """Bytes per second of each rank's host; None if all are equal."""
        found = tuple(self.bytes_per_s("host", host, links) for host in self.hosts)
        return found if len(set(found)) > 1 else None

    def describe_host_rates(self, links: Mapping[str, Link]) -> str:
        """Text that lists the hosts whose links differ and the source of each rate; "" if all are equal."""
        if self.rates(links) is None:
            return ""
        known = {
            host: f"{host.rpartition('/')[2]} {rate / 1e6:.3g} MB/s ({'measured' if host in self.measured else 'file'})"
            for host, rate in sorted(self.host_rates.items())
            if host in self.hosts
        }
        return f"{', '.join(known.values())}, other hosts {links['host'].bytes_per_s / 1e6:.3g} MB/s"

    def tiers(self) -> tuple[tuple[str, ...], ...]:
        """Places without redundant tiers: those with a single group, or with one group per inner group."""
        keep: list[int] = []
        for tier in range(len(TIERS)):
            groups = {place[tier:] for place in self.places}
            inner = {place[keep[-1] :] for place in self.places} if keep else set(self.places) | {()}
            if len(groups) > 1 and (not keep or len(groups) < len(inner)):
                keep.append(tier)
        if not keep or keep[0] != 0:
            keep.insert(0, 0)
        return tuple(tuple("/".join(reversed(place[tier:])) for tier in keep) for place in self.places)

    def distance(self, a: int, b: int) -> str:
        """The outermost tier that a message from a to b crosses: "memory" inside a host."""
        one, other = self.places[a], self.places[b]
        for tier in range(len(TIERS)):
            if one[tier:] == other[tier:]:
                return "memory" if tier == 0 else TIERS[tier - 1]
        return TIERS[-1]

    def path(self, a: int, b: int) -> list[tuple[str, str, str]]:
        """(tier, group, direction) of every link that a message from a to b uses."""
        links: list[tuple[str, str, str]] = []
        one, other = self.places[a], self.places[b]
        for tier, name in enumerate(TIERS):
            if one[tier:] == other[tier:]:
                break
            links.append((name, "/".join(reversed(one[tier:])), "out"))
            links.append((name, "/".join(reversed(other[tier:])), "in"))
        return links


def labels_from_environment(host_identity: str) -> tuple[str, str, str]:
    """This rank's host, rack and zone from LAKH_C3_HOST, LAKH_C3_RACK and LAKH_C3_ZONE.

    "{pid}" in LAKH_C3_HOST is the process id: it emulates one host for each rank, so that they connect over TCP.
    """
    environment = os.environ
    host = environment.get("LAKH_C3_HOST", "").replace("{pid}", str(os.getpid())) or host_identity
    return host, environment.get("LAKH_C3_RACK", ""), environment.get("LAKH_C3_ZONE", "")


def numa_node(cores: Iterable[int], nodes: str | Path = "/sys/devices/system/node") -> int | None:
    """The NUMA node that contains all these cores; None if they span several nodes or it is unknown."""
    wanted = set(cores)
    for folder in sorted(Path(nodes).glob("node[0-9]*")):
        try:
            listed = (folder / "cpulist").read_text().strip()
            node_cores: set[int] = set()
            for span in filter(None, listed.split(",")):
                first, _, last = span.partition("-")
                node_cores.update(range(int(first), int(last or first) + 1))
        except (OSError, ValueError):
            continue
        if wanted and wanted <= node_cores:
            return int(folder.name.removeprefix("node"))
    return None


def read_topology(path: str | Path, size: int | None = None) -> Topology:
    """Read a topology file. `size` is the expected number of ranks."""
    where = str(path)
    try:
        raw = Path(path).read_bytes()
        document = tomllib.loads(raw.decode())
    except OSError as error:
        raise UserError(where, error.strerror or "cannot be read", "check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(where, f"is not TOML ({error})", "correct the file") from None
    unknown = set(document) - {"hosts", "links", "wire"}
    if unknown:
        raise UserError(where, f"has unknown keys {sorted(unknown)}", "use [[hosts]], [links.TIER] and [wire.TIER]")
    places: dict[int, tuple[str, ...]] = {}
    names: set[tuple[str, ...]] = set()
    host_rates: dict[str, float] = {}
    for entry in _list(document.get("hosts"), where):
        unknown = set(entry) - {"name", "ranks", "rack", "zone", "Mbit_per_s"}
        if unknown or not isinstance(entry.get("name"), str) or not isinstance(entry.get("ranks"), list):
            raise UserError(where, f"[[hosts]] {entry}", "give name, ranks, and optionally rack, zone, Mbit_per_s")
        place = (entry["name"], str(entry.get("rack", "")), str(entry.get("zone", "")))
        if place in names:
            raise UserError(where, f"lists host {entry['name']} twice", "give each host a unique name")
        names.add(place)
        if "Mbit_per_s" in entry:
            rate = entry["Mbit_per_s"]
            if not isinstance(rate, int | float) or not rate > 0:
                raise UserError(where, f"host {entry['name']}: Mbit_per_s = {rate!r}", "give a number above 0")
            host_rates["/".join(reversed(place))] = rate * 1e6 / 8
        for rank in entry["ranks"]:
            if not isinstance(rank, int) or rank < 0 or rank in places:
                raise UserError(where, f"rank {rank!r} is not a number or is in two hosts", "list each rank once")
            places[rank] = place
    expected = len(places) if size is None else size
    if sorted(places) != list(range(expected)) or not places:
        raise UserError(where, f"describes ranks {sorted(places)}", f"describe ranks 0 to {expected - 1}, each once")
    links = {}
    for tier, entry in document.get("links", {}).items():
        if tier not in TIERS or not isinstance(entry, dict) or set(entry) - {"Mbit_per_s", "delay_us"}:
            raise UserError(where, f"[links.{tier}] {entry}", "use links.host, rack or zone with Mbit_per_s, delay_us")
        rate, delay = entry.get("Mbit_per_s", 0), entry.get("delay_us", 0)
        if not (isinstance(rate, int | float) and rate > 0 and isinstance(delay, int | float) and delay >= 0):
            raise UserError(where, f"[links.{tier}] {entry}", "use Mbit_per_s above 0 and delay_us of 0 or more")
        links[tier] = Link(rate * 1e6 / 8, delay)
    wires = {**WIRES, **{tier: _wire(tier, entry, where) for tier, entry in document.get("wire", {}).items()}}
    ranks = tuple(places[rank] for rank in range(expected))
    return Topology(ranks, links, host_rates, hashlib.sha256(raw).hexdigest(), wires=wires)


def _wire(tier: str, entry: Any, where: str) -> Wire:
    limits = {"streams": 64, "chunk_KB": 1 << 20, "in_flight_KB": 1 << 20}
    if tier not in TIERS or not isinstance(entry, dict) or set(entry) - set(limits):
        raise UserError(where, f"[wire.{tier}] {entry}", f"use wire.host, rack or zone with {', '.join(limits)}")
    for key, value in entry.items():
        if type(value) is not int or not 1 <= value <= limits[key]:
            raise UserError(where, f"[wire.{tier}] {key} = {value!r}", f"give a whole number from 1 to {limits[key]}")
    return replace(WIRES[tier], **entry)


def _list(value: Any, where: str) -> Sequence[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise UserError(where, "has no [[hosts]]", "list the hosts and their ranks")
    return value
