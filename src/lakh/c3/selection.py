"""Algorithm selection: a pure function of the message size, the topology and the link speeds of each tier.

The estimated time of a schedule is the sum over its stages of the one-way latency to the farthest peer and the transfer
time of the busiest link. Link speeds are measured, come from the topology file, or are the defaults below. If ranks are
too many to estimate and all alike, the fallback is halving-doubling up to 10 MB and ring above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lakh.c3.topology import Link, Topology
from lakh.spec import collectives
from lakh.spec.schedule import Buffer, Schedule, StepKind

__all__ = [
    "DEFAULT_LINKS",
    "FALLBACK_CROSSOVER_BYTES",
    "AlgorithmChoice",
    "choose_all_reduce",
    "choose_gather",
    "estimate_s",
    "fastest_first",
]

FALLBACK_CROSSOVER_BYTES = 10 * 1000 * 1000
MAX_ESTIMATED_RANKS = 64
"""Above this, building every rank's steps costs more than a better choice saves; the tiers decide."""

# Order-of-magnitude figures for kernel TCP (one-way tens of microseconds) and 10, 40 and 40 Gbit/s per group. Only
# their order matters until links are measured.
DEFAULT_LINKS: Mapping[str, Link] = {
    "memory": Link(8e9, 2),
    "host": Link(1.25e9, 30),
    "rack": Link(5e9, 60),
    "zone": Link(5e9, 500),
}


@dataclass(frozen=True)
class AlgorithmChoice:
    algorithm: str
    seconds: float
    reason: str
    rates: tuple[float, ...] | None = None
    """Of each rank, if slower ranks should own smaller parts."""
    order: tuple[int, ...] | None = None
    """Of the ranks, slowest last; None for the order of their numbers."""


def estimate_s(schedules: Sequence[Schedule], topology: Topology, links: Mapping[str, Link], width: int) -> float:
    """Estimated seconds for these schedules, one per rank. Stages with equal numbers run concurrently on all ranks."""
    delays_us: dict[int, float] = {}
    loads: dict[int, dict[tuple[str, str, str], float]] = {}
    for rank, schedule in enumerate(schedules):
        for step in schedule.steps:
            load = loads.setdefault(step.stage, {})
            if step.kind in (StepKind.HOST_REDUCE_SCATTER, StepKind.HOST_ALL_GATHER, StepKind.HOST_BROADCAST):
                key = ("memory", topology.hosts[rank], "")
                load[key] = load.get(key, 0.0) + step.count * width
                delays_us[step.stage] = max(delays_us.get(step.stage, 0.0), links["memory"].delay_us)
            if step.kind not in (StepKind.SEND, StepKind.RECV, StepKind.RECV_REDUCE):
                continue
            path = topology.path(rank, step.peer)
            delay_us = sum(links[tier].delay_us for tier, _, way in path if way == "out") or links["memory"].delay_us
            delays_us[step.stage] = max(delays_us.get(step.stage, 0.0), delay_us)
            if step.kind == StepKind.SEND:
                size = step.count * (1 if step.src == Buffer.WIRE else width)
                for link in path or [("memory", topology.hosts[rank], "")]:
                    load[link] = load.get(link, 0.0) + size
    busiest_s = sum(
        max((size / topology.bytes_per_s(tier, group, links) for (tier, group, _), size in load.items()), default=0.0)
        for load in loads.values()
    )
    return sum(delays_us.values()) * 1e-6 + busiest_s


def choose_all_reduce(
    topology: Topology, count: int, width: int, *, links: Mapping[str, Link] | None = None, codec: str = "none"
) -> AlgorithmChoice:
    """The fastest all_reduce for `count` elements of `width` bytes, with the reason."""
    size, tiers = topology.size, topology.tiers()
    known = {**DEFAULT_LINKS, **topology.links, **(links or {})}
    has_tiers = len(tiers[0]) > 1 or topology.num_hosts < size
    if size > MAX_ESTIMATED_RANKS:
        if has_tiers:
            reason = f"{size} ranks in {topology.num_hosts} hosts: tiers keep traffic local"
            return AlgorithmChoice("hierarchical", float("nan"), reason)
        ring = count * width > FALLBACK_CROSSOVER_BYTES
        rule = f"{count * width} bytes are {'above' if ring else 'below'} {FALLBACK_CROSSOVER_BYTES}, the fallback rule"
        return AlgorithmChoice("ring" if ring else "halving_doubling", float("nan"), rule)
    names = ["flat", "halving_doubling", "ring"] + (["hierarchical"] if has_tiers else [])
    if codec != "none":  # encoded data is exchanged once between the outermost groups, or flat if there are none
        names = ["hierarchical"] if has_tiers and topology.num_hosts > 1 else ["flat"]
    if width == 2:  # a ring rounds 16-bit sums at every hop; flat and hierarchical round once per tier
        names = [name for name in names if name in ("flat", "hierarchical")]
    rates, order = topology.rates(known), fastest_first(topology, known)
    estimates: dict[str, float] = {}
    for name in names:
        for label, shares in ((name, None), (f"{name} with unequal parts", rates)):
            if label == name or (shares is not None and codec == "none" and name in ("flat", "hierarchical")):
                schedules = [
                    collectives.all_reduce(
                        name, rank, size, count, places=tiers, codec=codec, rates=shares, order=order
                    )
                    for rank in range(size)
                ]
                estimates[label] = estimate_s(schedules, topology, known, width)
    best = min(estimates, key=lambda label: (estimates[label], label))
    name, _, unequal = best.partition(" with ")
    others = ", ".join(f"{label} {seconds * 1e3:.3g} ms" for label, seconds in estimates.items() if label != best)
    compared = f" compared with {others}" if others else ": the only candidate"
    slow = topology.describe_host_rates(known)
    reason = f"{best} {estimates[best] * 1e3:.3g} ms{compared}, by latency and busiest link" + (slow and f"; {slow}")
    return AlgorithmChoice(name, estimates[best], reason, rates if unequal else None, order)


def fastest_first(topology: Topology, links: Mapping[str, Link] | None = None) -> tuple[int, ...] | None:
    """The ranks, slowest last, so that in a tree no rank depends on them; None if all are equal."""
    rates = topology.rates({**DEFAULT_LINKS, **topology.links, **(links or {})})
    if rates is None:
        return None
    return tuple(sorted(range(topology.size), key=lambda rank: (-rates[rank], rank)))


def choose_gather(topology: Topology, requested: str | None = None) -> AlgorithmChoice:
    """The algorithm of all_gather and reduce_scatter between hosts; `requested` overrides the choice if it fits."""
    inside = topology.size // topology.num_hosts
    equal = collectives.is_regular([(host,) for host in topology.hosts])
    by_host = equal and inside > 1 and topology.num_hosts > 1
    if requested == "ring" or (requested == "flat" and by_host):
        return AlgorithmChoice(requested, float("nan"), "requested")
    if by_host:
        reason = f"each part enters a host once instead of once for each of its {inside} ranks"
        return AlgorithmChoice("hierarchical", float("nan"), reason)
    why = "one rank on each host" if inside == 1 or topology.num_hosts == topology.size else "unequal hosts"
    return AlgorithmChoice("flat", float("nan"), f"{why}: one stage, one rounding")
