"""A fabric scenario in, a report out: how fast a collective runs, what binds it, and how loaded the links are.

Rates are those of the steady state. A ring waits for its slowest pair in every step; the phases of other collectives
end when their last flow ends, with bandwidth handed on as flows finish (for up to MOST_EXACT_FLOWS flows; above that
the slowest flow's first rate counts, which is an upper bound of the time).

Not modelled: a ring's faster pairs sending less than their share because the slowest pair holds them back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lakh.errors import UserError
from lakh.planner.fabric.completion import finish_times
from lakh.planner.fabric.max_min import flow_rates
from lakh.planner.fabric.routing import ROUTINGS, RoutedFlows, route
from lakh.planner.fabric.topology import FabricTopology, Floats, Ints
from lakh.planner.fabric.traffic import COLLECTIVES, Phase, collective_phases, node_order
from lakh.planner.fabric.transport import admission_Bps, goodput_share
from lakh.spec.cluster import Cluster

__all__ = ["FabricReport", "FabricScenario", "simulate_fabric"]

MOST_EXACT_FLOWS = 5_000
LONG_PAIRS = 500_000
"""Pairs of GPUs in all phases above which a simulation reports its progress."""
SHOWN = 10
"""Slowest pairs and binding links of a report."""
SATURATED = 1 - 1e-6


@dataclass(frozen=True, kw_only=True)
class FabricScenario:
    gpus: int
    """Of one job."""
    qps: int = 4
    """Queue pairs of each connection."""
    split_messages: bool = False
    """Split every message over the queue pairs, so that the slowest one holds up the others, instead of giving whole
    messages to them in turn."""
    routing: str = "e-ecmp"
    order: str = "rack"
    """Order of the nodes in the collective: rack (neighbours are near) or random."""
    collective: str = "ring"
    size_bytes: float = 2.0**30
    pfc: bool = False
    """PFC alone instead of ideal congestion control: paused ports hold back flows that are not congested."""
    jobs: int = 1
    """Jobs of this size that run the collective at the same time."""
    fragmented: bool = False
    """Deal the nodes of every rack to different jobs, instead of giving whole racks to each. The other jobs visit their
    racks in a random order, so that racks are neighbours in one job and not in another."""
    dead_links: int = 0
    """Uplinks of leaves that are down, chosen at random."""
    dead_switches: int = 0
    """Switches above the leaves that are down, in the first zone."""
    slow_nics: int = 0
    """NICs that lost three quarters of their lanes, chosen at random: one lane of four is left."""
    uplinks: int | None = None
    """Uplinks of a leaf instead of the cluster file's."""
    in_flight_bytes: float | None = None
    """Admission: bytes that the receiver of a connection allows in flight."""
    loss: float = 0.0
    """Probability that a packet is lost on the outermost tier in use."""
    transport: str = "selective-repeat"
    seed: int = 1

    def check(self, cluster: Cluster) -> None:
        node = cluster.node_size
        for name, choices in (("routing", ROUTINGS), ("collective", COLLECTIVES), ("order", ("rack", "random"))):
            if getattr(self, name) not in choices:
                raise UserError(name, f"{getattr(self, name)!r} is not known", f"choose from: {', '.join(choices)}")
        if self.gpus * self.jobs > cluster.gpus:
            found = f"has {cluster.gpus:,} GPUs, {self.gpus * self.jobs:,} were requested"
            raise UserError(f"cluster {cluster.name}", found, "request fewer")
        if self.gpus % node:
            todo = f"choose a multiple of {node}"
            raise UserError("--gpus", f"{self.gpus} is not a whole number of nodes of {node} GPUs", todo)
        if self.fragmented and self.jobs < 2:
            raise UserError("--fragmented", "has one job, which owns all racks", "give --jobs 2")
        if not 0 <= self.loss < 1:
            raise UserError("--loss", f"{self.loss:g} is not a probability below 1", "give e.g. 1e-5")


@dataclass(frozen=True)
class FabricReport:
    flows: int
    """Flows of the largest phase: pairs of GPUs, times queue pairs where they have paths of their own."""
    pairs: int
    min_fraction: float
    """Rate of the slowest pair over the rate of a NIC."""
    mean_fraction: float
    time_s: float
    """Simulated time of the collective, of the slowest job."""
    ideal_s: float
    """The same on a network without contention, dead links and loss."""
    bus_GBps: float
    """Bus bandwidth as NCCL's tests define it; 0 for plain sends."""
    jobs: list[dict[str, float]]
    binding_links: list[dict[str, Any]]
    slowest: list[dict[str, Any]]
    link_load: list[dict[str, Any]]
    """Utilisation of the links of each stage."""
    phases: list[dict[str, Any]]
    notes: list[str]
    seconds: float
    """Wall time of the simulation."""
    heat: NDArray[np.float64] = field(repr=False, compare=False)
    """Utilisation of the uplinks of each leaf in the slowest phase: leaves x uplinks."""

    def as_dict(self) -> dict[str, Any]:
        data = asdict(self)
        del data["heat"]
        return data | {"simulated": True}


@dataclass(frozen=True)
class _PhaseResult:
    phase: Phase
    job_of_pair: Ints
    routed: RoutedFlows
    pair_rate: Floats
    binding: NDArray[np.int32]
    flow_rate: Floats
    job_seconds: Floats
    """Of all repeats."""
    ideal_s: float


def simulate_fabric(
    cluster: Cluster, scenario: FabricScenario, progress: Callable[[str], None] = lambda _: None
) -> FabricReport:
    """Simulate one scenario. `progress` is told before each phase of a long simulation."""
    scenario.check(cluster)
    began = time.perf_counter()
    topology = FabricTopology(cluster, uplinks=scenario.uplinks, pooled=scenario.routing == "spray")
    jobs = _job_nodes(topology, scenario)
    _inject_faults(topology, scenario, np.concatenate(jobs))
    by_job = [collective_phases(scenario.collective, nodes, topology.node.size, scenario.size_bytes) for nodes in jobs]
    if not by_job[0]:
        raise UserError("--gpus", "is one GPU, which has nobody to send to", "choose more")
    results = []
    for number, phases in enumerate(zip(*by_job, strict=True), start=1):
        if len(by_job[0]) * len(phases[0].sources) * scenario.jobs > LONG_PAIRS:
            progress(f"phase {number} of {len(by_job[0])}: {len(phases[0].sources) * scenario.jobs:,} pairs")
        results.append(_simulate_phase(topology, scenario, list(phases)))
    return _report(topology, scenario, results, began)


def _job_nodes(topology: FabricTopology, scenario: FabricScenario) -> list[Ints]:
    """Nodes of each job in the order of its collective."""
    each, jobs = scenario.gpus // topology.node.size, scenario.jobs
    if scenario.fragmented:
        rng = np.random.default_rng(scenario.seed)
        rows = np.arange(each * jobs).reshape(each, jobs)  # neighbouring nodes go to different jobs
        owners = rng.permuted(rows, axis=1).T
    else:
        owners = np.arange(each * jobs).reshape(jobs, each)
    orders = [scenario.order if job == 0 or not scenario.fragmented else "random" for job in range(jobs)]
    return [nodes[node_order(each, orders[job], scenario.seed + job)] for job, nodes in enumerate(owners)]


def _inject_faults(topology: FabricTopology, scenario: FabricScenario, nodes: Ints) -> None:
    rng = np.random.default_rng(scenario.seed + 17)
    gpus = (nodes[:, None] * topology.node.size + np.arange(topology.node.size)).ravel()
    if scenario.dead_links or scenario.dead_switches:
        if not topology.stages:
            raise UserError("dead links", f"cluster {topology.cluster.name} is one switch", "choose a larger cluster")
        leaves = np.unique(topology.leaf_of(gpus))
        uplinks = topology.num_uplinks if not topology.pooled else topology.leaf_gpus
        if scenario.dead_links > len(leaves) * uplinks:
            todo = f"choose at most {len(leaves) * uplinks}"
            raise UserError("--dead-links", f"{scenario.dead_links} of {len(leaves) * uplinks} uplinks", todo)
        cables = rng.choice(len(leaves) * uplinks, size=scenario.dead_links, replace=False)
        topology.kill_uplinks(leaves[cables // uplinks], cables % uplinks)
        for switch in range(scenario.dead_switches):
            topology.kill_switch(switch)
    if scenario.slow_nics:
        topology.slow_nics(rng.choice(gpus, size=min(scenario.slow_nics, len(gpus)), replace=False), 0.25)


def _simulate_phase(topology: FabricTopology, scenario: FabricScenario, phases: list[Phase]) -> _PhaseResult:
    """One phase of all jobs, which run it at the same time."""
    sources, targets = (np.concatenate([getattr(p, side) for p in phases]) for side in ("sources", "targets"))
    job_of_pair = np.repeat(np.arange(len(phases)), [len(p.sources) for p in phases])
    phase = phases[0]
    routed = route(topology, sources, targets, routing=scenario.routing, qps=scenario.qps, seed=scenario.seed)
    turn = topology.turn_of(sources, targets)
    latency_s = topology.latencies_s[turn]
    links, capacity = routed.links, topology.capacity
    if scenario.in_flight_bytes:  # a link of its own for each connection
        caps = admission_Bps(scenario.in_flight_bytes, 2 * latency_s)
        links = np.concatenate([(topology.num_links + routed.pair[:, None]).astype(np.int32), links], axis=1)
        capacity = np.concatenate([capacity, caps])
    rates, binding = flow_rates(links, capacity, pfc=scenario.pfc)
    pair_rate = np.bincount(routed.pair, weights=rates, minlength=routed.num_pairs)
    if scenario.split_messages:
        first = np.searchsorted(routed.pair, np.arange(routed.num_pairs))
        pair_rate = np.minimum.reduceat(rates, first) * np.bincount(routed.pair)
    if scenario.loss:
        is_far = turn == turn.max()
        share = goodput_share(scenario.transport, scenario.loss, pair_rate, 2 * latency_s)
        pair_rate = np.where(is_far, pair_rate * share, pair_rate)
    ring = scenario.collective == "ring"
    exact = not ring and len(rates) <= MOST_EXACT_FLOWS and not scenario.loss
    with np.errstate(divide="ignore"):
        seconds = phase.size_bytes / pair_rate
    if exact and (pair_rate > 0).all():
        counts = np.bincount(routed.pair, minlength=routed.num_pairs)
        sizes = phase.size_bytes / counts[routed.pair]
        ends = finish_times(links, capacity, sizes, pfc=scenario.pfc)
        seconds = np.zeros(routed.num_pairs)
        np.maximum.at(seconds, routed.pair, ends)
    job_seconds = np.zeros(len(phases))
    for job in range(len(phases)):
        mine = job_of_pair == job
        wait_s = latency_s[mine].mean() if ring else latency_s[mine].max()
        job_seconds[job] = phase.repeats * (seconds[mine].max() + wait_s)
    nominal = np.where(turn < 0, topology.node.bandwidth_Bps, topology.nic_Bps)
    ideal = phase.repeats * (phase.size_bytes / nominal.min() + (latency_s.mean() if ring else latency_s.max()))
    return _PhaseResult(phase, job_of_pair, routed, pair_rate / nominal, binding, rates, job_seconds, float(ideal))


def _report(
    topology: FabricTopology, scenario: FabricScenario, results: list[_PhaseResult], began: float
) -> FabricReport:
    job_seconds = np.sum([result.job_seconds for result in results], axis=0)
    worst = min(results, key=lambda result: float(result.pair_rate.min()))
    ideal_s = sum(result.ideal_s for result in results)
    inside_s = _inside_node_s(topology, scenario)
    notes = []
    if topology.leaf_is_assumed:
        notes.append(f"the cluster file names no rack: leaf switches of {topology.leaf_gpus} GPUs are assumed")
    if inside_s > job_seconds.max():
        notes.append("NVLink inside the nodes is slower than the network and sets the time")
    time_s = max(float(job_seconds.max()), inside_s)
    weights = np.array([result.ideal_s for result in results])
    mean = float(np.average([result.pair_rate.mean() for result in results], weights=weights))
    load = _link_load(topology, worst)
    return FabricReport(
        flows=max(len(result.flow_rate) for result in results),
        pairs=max(result.routed.num_pairs for result in results),
        min_fraction=float(worst.pair_rate.min()),
        mean_fraction=mean,
        time_s=time_s,
        ideal_s=max(float(ideal_s), inside_s),
        bus_GBps=_bus_GBps(scenario, time_s),
        jobs=[_job_row(results, job, float(s)) for job, s in enumerate(job_seconds)],
        binding_links=_binding_links(topology, worst, load),
        slowest=_slowest(topology, worst),
        link_load=_load_by_stage(topology, load),
        phases=[
            {"pairs": r.routed.num_pairs, "size_bytes": r.phase.size_bytes, "repeats": r.phase.repeats,
             "seconds": float(r.job_seconds.max()), "min_fraction": float(r.pair_rate.min())}
            for r in results
        ],
        notes=notes,
        seconds=time.perf_counter() - began,
        heat=_heat(topology, load, worst),
    )  # fmt: skip


def _inside_node_s(topology: FabricTopology, scenario: FabricScenario) -> float:
    """A ring's traffic over NVLink: every GPU passes all channels on, except the one that it sends out itself."""
    node, gpus = topology.node.size, scenario.gpus
    if scenario.collective != "ring" or gpus == node:
        return 0.0
    sent = 2 * (gpus - 1) / gpus * scenario.size_bytes * (node - 1) / node
    return sent / topology.node.bandwidth_Bps


def _bus_GBps(scenario: FabricScenario, time_s: float) -> float:
    n = scenario.gpus
    factor = {"send": 0.0, "all-to-all": (n - 1) / n}.get(scenario.collective, 2 * (n - 1) / n)
    return factor * scenario.size_bytes / time_s / 1e9


def _job_row(results: list[_PhaseResult], job: int, seconds: float) -> dict[str, float]:
    rates = np.concatenate([result.pair_rate[result.job_of_pair == job] for result in results])
    return {"time_s": seconds, "min_fraction": float(rates.min()), "mean_fraction": float(rates.mean())}


def _link_load(topology: FabricTopology, result: _PhaseResult) -> Floats:
    links = result.routed.links
    used = links >= 0
    rates = np.broadcast_to(result.flow_rate[:, None], links.shape)
    load: Floats = np.bincount(links[used], weights=rates[used], minlength=topology.num_links).astype(np.float64)
    return load


def _binding_links(topology: FabricTopology, result: _PhaseResult, load: Floats) -> list[dict[str, Any]]:
    """Links that bind the slowest flows, slowest first."""
    links, order = result.binding, np.argsort(result.flow_rate, kind="stable")
    links = links[order]
    links = links[(links >= 0) & (links < topology.num_links)]
    _, first = np.unique(links, return_index=True)
    counts = np.bincount(links, minlength=topology.num_links)
    return [
        {
            "link": topology.link_name(int(link)),
            "flows": int(counts[link]),
            "load_GBps": float(load[link] / 1e9),
            "capacity_GBps": float(topology.capacity[link] / 1e9),
        }
        for link in links[np.sort(first)[:SHOWN]]
    ]


def _slowest(topology: FabricTopology, result: _PhaseResult) -> list[dict[str, Any]]:
    rows = []
    first_flow = np.searchsorted(result.routed.pair, np.arange(result.routed.num_pairs))
    ends = result.routed.links
    for pair in np.argsort(result.pair_rate, kind="stable")[:SHOWN]:
        links = ends[first_flow[pair]]
        source, target = int(links[0]) % topology.num_gpus, int(links[-1]) % topology.num_gpus
        rows.append({"source": source, "target": target, "fraction": float(result.pair_rate[pair])})
    return rows


def _load_by_stage(topology: FabricTopology, load: Floats) -> list[dict[str, Any]]:
    gpus = topology.num_gpus
    spans = [("NIC up", 0, gpus), ("NIC down", gpus, 2 * gpus)]
    for stage in topology.stages:
        size = stage.first_down - stage.first_up
        spans.append((f"{stage.below} to {stage.tier}", stage.first_up, stage.first_down))
        spans.append((f"{stage.tier} to {stage.below}", stage.first_down, stage.first_down + size))
    rows = []
    for name, begin, end in spans:
        capacity = topology.capacity[begin:end]
        used = load[begin:end][(load[begin:end] > 0) & (capacity > 0)]
        if not len(used):
            continue
        share = used / capacity[(load[begin:end] > 0) & (capacity > 0)]
        rows.append(
            {"links": name, "used": len(used), "mean": float(share.mean()), "p95": float(np.quantile(share, 0.95)),
             "max": float(share.max()), "saturated": int((share >= SATURATED).sum()),
             "total_GBps": float(used.sum() / 1e9)}
        )  # fmt: skip
    return rows


def _heat(topology: FabricTopology, load: Floats, result: _PhaseResult) -> Floats:
    if not topology.stages:
        return np.zeros((0, 0))
    first = topology.stages[0]
    capacity = topology.capacity[first.first_up : first.first_down]
    share = np.divide(
        load[first.first_up : first.first_down], capacity, out=np.zeros_like(capacity), where=capacity > 0
    )
    used = np.unique(topology.leaf_of(result.routed.links[:, 0].astype(np.int64) % topology.num_gpus))
    return share.reshape(-1, first.num_paths)[used]
