"""Candidates at higher fidelity: pipelines through their timelines, links between sites through the fabric.

Timelines replace the closed forms of the bubble and of slow boundaries. The fabric simulates the flows that really
cross a link, under the candidate's routing and queue pairs, and replaces the estimate of how evenly they are spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lakh.planner.across.candidates import SiteCandidate
from lakh.planner.across.crossing import Crossing
from lakh.planner.across.joint_search import JointSearch
from lakh.planner.across.layout_rows import DEEP, INTERLEAVED, KINDS
from lakh.planner.across.placement_work import PlacementWork, StepParts
from lakh.planner.execution_plan import FULL
from lakh.planner.fabric.max_min import flow_rates
from lakh.planner.fabric.routing import route
from lakh.planner.fabric.topology import FabricTopology
from lakh.planner.schedules.long_step import ROUNDS, long_step_s
from lakh.planner.schedules.operations import PipelineSchedule
from lakh.planner.schedules.orders import build_schedule, extra_warm_up
from lakh.planner.schedules.timeline import OperationSeconds
from lakh.spec.cluster import Cluster, Tier

__all__ = ["Refinement", "pipeline_s"]

SIMULATED_QPS = 8
"""Most queue pairs of a fabric simulation: more spread the flows of a full site no further."""


def pipeline_s(
    kind: int, chunks: int, stages: int, micro_batches: int, seconds: OperationSeconds,
    delays: Sequence[tuple[int, float]], rounds: int = ROUNDS,
) -> float:  # fmt: skip
    """The time of all micro-batches on a pipeline, from the timeline of its schedule."""
    if stages == 1:
        return micro_batches * seconds.total
    between = [0.0] * (stages - 1)
    for before, delay in delays:
        between[before - 1] += delay
    warm_up = extra_warm_up(between, seconds.total) if kind == DEEP and delays else ()
    name = "1f1b" if kind == DEEP else KINDS[kind]

    def schedule_of(count: int) -> PipelineSchedule:
        return build_schedule(name, stages, count, chunks if kind == INTERLEAVED else 1, warm_up)

    return long_step_s(schedule_of, stages, micro_batches, seconds, between, rounds)


@dataclass
class Refinement:
    search: JointSearch
    _balances: dict[tuple[object, ...], float] = field(default_factory=dict)
    _pipelines: dict[tuple[object, ...], float] = field(default_factory=dict)
    """Candidates that differ in their network or gradients have the same pipelines."""

    def timeline(self, one: SiteCandidate, balance: dict[int, float] | None = None) -> SiteCandidate:
        """The candidate with the time of its pipelines' timelines."""
        search = self.search
        work = search.work(one.placement, one.layout, [one.network])
        crossing = Crossing(search.network, search.model, search.sequence, one.network, balance or {})
        step = work.step(crossing, one.sync)
        waits = max(self._wait_s(work, crossing, group) for group in range(len(one.placement.groups)))
        parts = StepParts(float(step.busy_s[0]), waits, float(step.gradients_s[0]))
        return one.timed(parts, "timeline" if balance is None else "fabric")

    def _wait_s(self, work: PlacementWork, crossing: Crossing, number: int) -> float:
        """What the timeline of a group adds to the closed form without slow boundaries; less than 0 if it is faster."""
        rows, group = work.rows, work.placement.groups[number]
        replicas = work.replicas[number]
        count, stage = int(work.micro_batches[number][0]), float(work.stage_s(number)[0])
        pace = max(stage, float(crossing.pace_s(group, rows, replicas)[0]))
        delays = [(before, float(delay[0])) for before, delay in crossing.boundaries(group, rows, replicas)]
        forward = pace / (4 if int(rows.recompute[0]) == FULL else 3)
        seconds = OperationSeconds(forward=forward, input=pace - 2 * forward, weight=forward)
        pipeline = (int(rows.kind[0]), int(rows.chunks[0]), rows.stages, count, seconds, tuple(delays))
        if pipeline not in self._pipelines:
            self._pipelines[pipeline] = pipeline_s(*pipeline)
        bubble = max(float(one.bubble_s[0]) for one in work.times[number])
        return self._pipelines[pipeline] - count * stage - bubble

    def fabric(self, one: SiteCandidate) -> SiteCandidate:
        """The candidate with simulated flows on the links that it crosses."""
        balance = {link: self._balance(link, site, flows, one) for link, (site, flows) in self._flows(one).items()}
        return self.timeline(one, balance) if balance else replace(one, fidelity="fabric")

    def _flows(self, one: SiteCandidate) -> dict[int, tuple[int, int]]:
        """Link -> (a site that sends over it, GPUs of it that send): the largest transfer over each link."""
        found: dict[int, tuple[int, int]] = {}
        rank_gpus = int(one.layout.rank_gpus[0])

        def add(a: int, b: int, flows: int) -> None:
            for link in self.search.network.paths[a, b]:
                if flows > found.get(link, (0, 0))[1]:
                    found[link] = (a, min(flows, self.search.network.gpus[a]))

        for number, group in enumerate(one.placement.groups):
            for a, b in zip(group.sites, group.sites[1:], strict=False):
                add(a, b, one.replicas[number] * rank_gpus)
        for (number, a, b), stages in one.placement.replica_pairs.items():
            after = one.replicas[(number + 1) % len(one.replicas)]
            add(a, b, min(one.replicas[number], after) * rank_gpus * stages)
        return found

    def _balance(self, link: int, site: int, flows: int, one: SiteCandidate) -> float:
        """Share of the link that the flows use when all go at the rate of the slowest."""
        network, option = self.search.network, one.network
        wave_Bps = network.links[link].wavelength_Gbps * 1e9 / 8
        capacity = float(network.capacity_Bps[link]) + option.wavelengths * wave_Bps
        qps = min(option.qps, SIMULATED_QPS)
        key = (link, site, flows, option.routing, qps, option.wavelengths)
        if key not in self._balances:
            cluster = _two_sites(network.clusters[site], capacity)
            topology = FabricTopology(cluster, pooled=option.routing == "spray")
            sources = np.arange(flows, dtype=np.int64)
            routed = route(topology, sources, sources + cluster.gpus // 2, routing=option.routing, qps=qps, seed=1)
            rates, _ = flow_rates(routed.links, topology.capacity)
            slowest = float(np.bincount(routed.pair, weights=rates).min())
            self._balances[key] = 1.0 if slowest >= topology.nic_Bps * 0.999 else min(slowest * flows / capacity, 1.0)
        return self._balances[key]


def _two_sites(cluster: Cluster, capacity_Bps: float) -> Cluster:
    """A site and its copy, with a link of this capacity between them."""
    nic = cluster.tiers[-1].bandwidth_GBps
    over = max(cluster.gpus * nic * 1e9 / capacity_Bps, 1.0)
    link = Tier(name="link", size=2 * cluster.gpus, bandwidth_GBps=nic, latency_us=0.0, oversubscription=over)
    return replace(cluster, tiers=(*cluster.tiers, link))
