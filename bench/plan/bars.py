"""The planner's targets beside what this machine reaches: one row per target.

Times are of a warm process (numba has compiled, tables are read). Peak memory is of this process, after the largest
simulation. What is compared with a publication does not depend on the machine.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.harness import BenchRow
from lakh.planner.across.across_plan import plan_across
from lakh.planner.across.sites import load_sites
from lakh.planner.catalogue import load_model
from lakh.planner.fabric.routing import route
from lakh.planner.fabric.simulation import FabricReport, FabricScenario, simulate_fabric
from lakh.planner.fabric.topology import FabricTopology
from lakh.planner.fabric.traffic import collective_phases, node_order
from lakh.planner.validation.published_steps import compare_published, load_published_steps
from lakh.spec.cluster import load_cluster

__all__ = ["BarScale", "bench_bars"]

QPS = 4
SEEDS = tuple(range(1, 8))
FABRIC = "h100-100k"
ZONE_CLUSTER = "llama3-24k-roce"


@dataclass(frozen=True)
class BarScale:
    """Sizes of the simulated jobs."""

    most: int = 98304
    some: int = 24576
    zone: int = 3072
    rack_jobs: int = 128
    across: bool = True
    """Also the search over three sites of 98,304 GPUs in all, half a minute."""


def bench_bars(scale: BarScale | None = None, log: Callable[[str], None] = lambda _: None) -> list[BenchRow]:
    scale = scale or BarScale()
    rows = _fabric_rows(scale, log)
    rows += _published_rows(scale, log)
    if scale.across:
        rows += _across_rows(log)
    return rows


def _fabric_rows(scale: BarScale, log: Callable[[str], None]) -> list[BenchRow]:
    place, rows = load_cluster(FABRIC), []
    for gpus, order, most_s in ((scale.most, "rack", 3.0), (scale.most, "random", 5.0), (scale.some, "random", 1.0)):
        log(f"ring over {gpus:,} GPUs, {order} order")
        simulate_fabric(place, FabricScenario(gpus=128, order=order, qps=QPS))
        report = simulate_fabric(place, FabricScenario(gpus=gpus, order=order, qps=QPS))
        what = f"ring over {gpus:,} GPUs, {order} order, {QPS} QPs"
        rows.append(_below(what, report.seconds, most_s, "s", flows=report.flows))
    log("traffic engineering")
    topology = FabricTopology(place)
    nodes = node_order(scale.most // place.node_size, "rack", 1)
    (phase,) = collective_phases("ring", nodes, place.node_size, 2.0**30)
    route(topology, phase.sources[:128], phase.targets[:128], routing="te", qps=QPS, seed=1)
    began = time.perf_counter()
    routed = route(topology, phase.sources, phase.targets, routing="te", qps=QPS, seed=1)
    spent = time.perf_counter() - began
    uplinks = routed.links[:, 1]
    most = int(np.bincount(uplinks[uplinks >= 0]).max())
    what = f"exact traffic engineering, {scale.most:,} GPUs"
    rows.append(_below(what, spent, 1.0, "s", flows=len(routed.paths)))
    rows.append(_below(f"{what}: flows on the fullest uplink of a leaf", most, 1.5, "flows"))
    peak_GB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    rows.append(_below("peak memory of this process", peak_GB, 4.0, "GB"))
    return rows


def _published_rows(scale: BarScale, log: Callable[[str], None]) -> list[BenchRow]:
    rows, place = [], load_cluster(ZONE_CLUSTER)

    def median(pick: Callable[[FabricReport], float], **options: object) -> float:
        return statistics.median(
            pick(simulate_fabric(place, FabricScenario(seed=seed, **options)))  # type: ignore[arg-type]
            for seed in SEEDS
        )

    for gpus in (scale.rack_jobs, scale.zone):
        log(f"queue pairs, {gpus:,} GPUs")
        plain = median(lambda report: report.bus_GBps, gpus=gpus, routing="ecmp", qps=QPS)
        by_qps = [median(lambda report: report.bus_GBps, gpus=gpus, qps=qps) for qps in (1, 2, QPS, 8, 16)]
        what = f"E-ECMP with {QPS} QPs over ECMP, AllReduce of {gpus:,} GPUs (published: up to +40 %)"
        rows.append(_above(what, by_qps[2] / plain - 1, 0.4, "of ECMP"))
        steps = min(round(after - before, 6) for before, after in pairwise(by_qps))  # equal ones differ by rounding
        rows.append(_above(f"smallest gain by twice the QPs (1 to 16), {gpus:,} GPUs", steps, 0.0, "GB/s"))
    log("path pinning")
    whole = median(lambda report: report.min_fraction, gpus=scale.zone // 2, routing="pinned", jobs=2)
    halves = median(lambda report: report.min_fraction, gpus=scale.zone // 2, routing="pinned", jobs=2, fragmented=True)
    rows.append(_above("path pinning, loss with half-filled racks (published: > 30 %)", 1 - halves / whole, 0.3, ""))
    log("published steps")
    worst = max(abs(row["points"]) for row in compare_published(load_published_steps()))
    rows.append(_below("405B through network and schedule, worst published row", worst, 3.0, "MFU points"))
    return rows


def _across_rows(log: Callable[[str], None]) -> list[BenchRow]:
    log("search over three sites")
    found = plan_across(load_model("llama3-405b"), load_sites("three-regions"), batch=4096, sequence=8192)
    singles = [gain for name, gain in found.gain.items() if name != "production"]
    return [
        _below("full search over three sites, 98,304 GPUs", found.seconds, 60.0, "s", flows=found.searched),
        _above("gain over the production default", found.gain["production"], 0.3, "of its step"),
        _above("smallest gain over any baseline", min(singles), 0.0, "of its step"),
    ]


def _below(what: str, value: float, bar: float, unit: str, flows: int | None = None) -> BenchRow:
    return _row(what, value, f"< {bar:g}", unit, value < bar, flows)


def _above(what: str, value: float, bar: float, unit: str) -> BenchRow:
    return _row(what, value, f">= {bar:g}", unit, value >= bar, None)


def _row(what: str, value: float, target: str, unit: str, is_met: bool, flows: int | None) -> BenchRow:
    row: BenchRow = {"what": what, "value": float(value), "unit": unit, "target": target, "met": is_met}
    return row | {"count": flows if flows is not None else ""}
