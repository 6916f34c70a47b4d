"""Emulated networks: the topology of some ranks, its file, and links that the native core's shaper slows down."""

from __future__ import annotations

import json
from dataclasses import fields, replace

from lakh.c3 import native
from lakh.c3.group import CommGroup
from lakh.c3.topology import Link, Topology

__all__ = ["emulate_links", "first_ranks", "to_toml"]

KEYS = ("name", "rack", "zone")
"""Keys of a [[hosts]] entry, in the order of a place."""


def first_ranks(topology: Topology, count: int) -> Topology:
    """The topology of ranks 0 to count - 1."""
    hosts = set(topology.hosts[:count])
    host_rates = {host: rate for host, rate in topology.host_rates.items() if host in hosts}
    return replace(topology, places=topology.places[:count], host_rates=host_rates)


def to_toml(topology: Topology, *, links: bool) -> str:
    """The topology as a file; `links` includes link rates and transport settings."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, place in enumerate(topology.places):
        ranks.setdefault(place, []).append(rank)
    text = ""
    for place, members in ranks.items():
        text += "[[hosts]]\n"
        text += "".join(f"{key} = {json.dumps(name)}\n" for key, name in zip(KEYS, place, strict=True) if name)
        rate = topology.host_rates.get("/".join(reversed(place)))
        text += f"Mbit_per_s = {rate * 8 / 1e6}\n" if links and rate is not None else ""
        text += f"ranks = {members}\n\n"
    for tier, link in topology.links.items() if links else ():
        text += f"[links.{tier}]\nMbit_per_s = {link.bytes_per_s * 8 / 1e6}\ndelay_us = {link.delay_us}\n\n"
    for tier, wire in topology.wires.items() if links else ():
        settings = "".join(f"{field.name} = {getattr(wire, field.name)}\n" for field in fields(wire))
        text += f"[wire.{tier}]\n{settings}\n"
    return text


def emulate_links(group: CommGroup, topology: Topology, file: str) -> None:
    """Limit a group's traffic to the links of `topology`, shared by all processes that pass the same `file`."""
    numbers: dict[tuple[str, str, str], int] = {}
    for a in range(group.size):
        for b in range(group.size):
            for link in topology.path(a, b):
                numbers.setdefault(link, len(numbers))
    for peer in range(group.size):
        for link in topology.path(group.rank, peer):
            tier, name, way = link
            if tier not in topology.links and name not in topology.host_rates:
                continue
            known = {tier: Link(float("inf")), **topology.links}
            delay_us = int(known[tier].delay_us) if way == "out" else 0
            rate = topology.bytes_per_s(tier, name, known)
            status = group.library.lakh_c3_shape(group.handle, peer, file.encode(), numbers[link], rate, delay_us)
            if status:
                raise native.last_error(status, f"c3 emulated link {link}")
