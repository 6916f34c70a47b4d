"""Which algorithm: a pure function of the size, the topology and what each tier's links cost.

The cost of a schedule is that of its stages, one after another: the one-way time to the farthest peer, plus the time of
the busiest link, bytes through it over what it carries. Links come measured, from the topology file, or as
the stated defaults. Where nothing is known of the network and all ranks are alike, halving-doubling below 10 MB and
ring above is the documented rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lakh.c3.topology import Link, Topology
from lakh.spec import collectives
from lakh.spec.collectives import Kind, Schedule

__all__ = [
    "DEFAULT_LINKS",
    "FALLBACK_CROSSOVER_BYTES",
    "Choice",
    "choose_all_reduce",
    "choose_spreading",
    "fastest_first",
    "price",
]

FALLBACK_CROSSOVER_BYTES = 10 * 1000 * 1000
MAX_PRICED_RANKS = 64
"""Above, pricing every rank's steps costs more than it can save; the tiers decide."""

# Order-of-magnitude figures of kernel TCP (one way tens of microseconds) and 10, 40 and 40 Gbit/s per group; only their
# order matters before anything is measured.
DEFAULT_LINKS: Mapping[str, Link] = {
    "memory": Link(8e9, 2),
    "host": Link(1.25e9, 30),
    "rack": Link(5e9, 60),
    "zone": Link(5e9, 500),
}


@dataclass(frozen=True)
class Choice:
    algorithm: str
    seconds: float
    reason: str
    rates: tuple[float, ...] | None = None
    """Of each rank, where the slower ones are to own smaller parts."""
    order: tuple[int, ...] | None = None
    """Of the ranks, the slowest last, where that is not the order of their numbers."""


def price(schedules: Sequence[Schedule], topology: Topology, links: Mapping[str, Link], width: int) -> float:
    """Seconds that the ranks need for these schedules, one of each rank: each stage takes its latency and the time of
    its busiest link. Stages of the same number are taken to run at the same time on all ranks.
    """
    delays_us: dict[int, float] = {}
    loads: dict[int, dict[tuple[str, str, str], float]] = {}
    for rank, schedule in enumerate(schedules):
        for step in schedule.steps:
            load = loads.setdefault(step.stage, {})
            if step.kind in (Kind.HOST_REDUCE_SCATTER, Kind.HOST_ALL_GATHER, Kind.HOST_BROADCAST):
                key = ("memory", topology.hosts[rank], "")
                load[key] = load.get(key, 0.0) + step.count * width
                delays_us[step.stage] = max(delays_us.get(step.stage, 0.0), links["memory"].delay_us)
            if step.kind not in (Kind.SEND, Kind.RECV, Kind.RECV_REDUCE):
                continue
            path = topology.path(rank, step.peer)
            delay_us = sum(links[tier].delay_us for tier, _, way in path if way == "out") or links["memory"].delay_us
            delays_us[step.stage] = max(delays_us.get(step.stage, 0.0), delay_us)
            if step.kind == Kind.SEND:
                size = step.count * (1 if step.src == collectives.Buffer.WIRE else width)
                for link in path or [("memory", topology.hosts[rank], "")]:
                    load[link] = load.get(link, 0.0) + size
    busiest_s = sum(
        max((size / topology.bytes_per_s(tier, group, links) for (tier, group, _), size in load.items()), default=0.0)
        for load in loads.values()
    )
    return sum(delays_us.values()) * 1e-6 + busiest_s


def choose_all_reduce(
    topology: Topology, count: int, width: int, *, links: Mapping[str, Link] | None = None, codec: str = "none"
) -> Choice:
    """The cheapest all_reduce of `count` elements of `width` bytes, and why it is."""
    size, tiers = topology.size, topology.tiers()
    known = {**DEFAULT_LINKS, **topology.links, **(links or {})}
    layered = len(tiers[0]) > 1 or topology.num_hosts < size
    if size > MAX_PRICED_RANKS:
        if layered:
            return Choice(
                "hierarchical", float("nan"), f"{size} ranks in {topology.num_hosts} hosts: tiers keep bytes in"
            )
        ring = count * width > FALLBACK_CROSSOVER_BYTES
        rule = f"{count * width} bytes are {'above' if ring else 'below'} {FALLBACK_CROSSOVER_BYTES}, the fallback rule"
        return Choice("ring" if ring else "halving_doubling", float("nan"), rule)
    names = ["flat", "halving_doubling", "ring"] + (["hierarchical"] if layered else [])
    if codec != "none":  # encoded data is exchanged once between the outermost groups, or flat where there are none
        names = ["hierarchical"] if layered and topology.num_hosts > 1 else ["flat"]
    if width == 2:  # a ring rounds 16-bit sums at every hop; flat and hierarchical round once per tier
        names = [name for name in names if name in ("flat", "hierarchical")]
    rates, order = topology.rates(known), fastest_first(topology, known)
    priced: dict[str, float] = {}
    for name in names:
        for label, shares in ((name, None), (f"{name} with unequal parts", rates)):
            if label == name or (shares is not None and codec == "none" and name in ("flat", "hierarchical")):
                schedules = [
                    collectives.all_reduce(
                        name, rank, size, count, places=tiers, codec=codec, rates=shares, order=order
                    )
                    for rank in range(size)
                ]
                priced[label] = price(schedules, topology, known, width)
    best = min(priced, key=lambda label: (priced[label], label))
    name, _, unequal = best.partition(" with ")
    others = ", ".join(f"{label} {seconds * 1e3:.3g} ms" for label, seconds in priced.items() if label != best)
    beside = f" beside {others}" if others else ": the only one that fits"
    slow = topology.slow_hosts(known)
    reason = f"{best} {priced[best] * 1e3:.3g} ms{beside}, by latency and busiest link" + (slow and f"; {slow}")
    return Choice(name, priced[best], reason, rates if unequal else None, order)


def fastest_first(topology: Topology, links: Mapping[str, Link] | None = None) -> tuple[int, ...] | None:
    """The ranks with the slowest last, where in a tree nobody waits for them; None where all are alike."""
    rates = topology.rates({**DEFAULT_LINKS, **topology.links, **(links or {})})
    if rates is None:
        return None
    return tuple(sorted(range(topology.size), key=lambda rank: (-rates[rank], rank)))


def choose_spreading(topology: Topology, asked: str | None = None) -> Choice:
    """How an all_gather or a reduce_scatter goes between hosts; `asked` overrules where it fits."""
    inside = topology.size // topology.num_hosts
    equal = collectives.is_regular([(host,) for host in topology.hosts])
    by_host = equal and inside > 1 and topology.num_hosts > 1
    if asked == "ring" or (asked == "flat" and by_host):
        return Choice(asked, float("nan"), "asked for")
    if by_host:
        reason = f"each part enters a host once and not once for each of its {inside} ranks"
        return Choice("hierarchical", float("nan"), reason)
    why = "one rank on each host" if inside == 1 or topology.num_hosts == topology.size else "unequal hosts"
    return Choice("flat", float("nan"), f"{why}: one stage, one rounding")
