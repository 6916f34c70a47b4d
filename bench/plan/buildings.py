"""Collectives between emulated buildings: what the planner predicts beside what c3 takes.

Four hosts in two buildings. Links are limited by token buckets between network namespaces (requires root), or by c3's
own traffic shaper where a link has a delay. Latency and rate of both kinds of links come from broadcasts between two
hosts, measured before; the collectives themselves are never used to set a parameter. A prediction is the sum over the
phases of the collective's schedule: latency of the farthest message, and the bytes on the busiest link over its rate.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.comm.collectives import CommSweep, bench_collectives
from bench.comm.emulation import to_toml
from bench.harness import BenchRow
from lakh.c3.schedule_cache import ScheduleCache
from lakh.c3.topology import Link, Topology
from lakh.planner.fabric.traffic import Phase, schedule_phases
from lakh.spec.schedule import Schedule

__all__ = ["LinkSpeed", "buildings", "compare_buildings", "predict_s", "schedules_of"]

HOST_Mbps, TRUNK_Mbps = 400.0, 100.0
DELAY_US = 10_000.0
"""Between buildings, one way: 2,000 km of fibre."""
SIZES = (512 << 10, 2 << 20)
SMALL, LARGE = 1 << 10, 1 << 20
"""Of the broadcasts that measure a link."""
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ALGORITHMS = ("flat", "ring", "hierarchical")
WIDTH = 4


@dataclass(frozen=True)
class LinkSpeed:
    latency_s: float
    bytes_per_s: float


def buildings(delay_us: float) -> Topology:
    """Two hosts in each of two buildings; a building is a rack of the topology file."""
    places = tuple((f"h{rank}", f"b{rank // 2}", "") for rank in range(4))
    links = {"host": Link(HOST_Mbps * 1e6 / 8), "rack": Link(TRUNK_Mbps * 1e6 / 8, delay_us)}
    return Topology(places, links)


def compare_buildings(log: Callable[[str], None] = lambda text: None) -> list[BenchRow]:
    """Rows of all collectives, without and with a delay between the buildings."""
    rows: list[BenchRow] = []
    for delay_us in (0.0, DELAY_US):
        topology = buildings(delay_us)
        log(f"links, delay {delay_us / 1e3:g} ms")
        speeds = {"host": _link_speed(topology, (0, 1)), "rack": _link_speed(topology, (0, 2))}
        for algorithm in ALGORITHMS:
            log(f"{algorithm}, delay {delay_us / 1e3:g} ms")
            ops = OPS if algorithm == "flat" else OPS[:1]
            measured = _measure(topology, ops, SIZES, algorithm)
            for (op, size_bytes), seconds in measured.items():
                predicted = predict_s(topology, schedules_of(topology, op, size_bytes, algorithm), speeds)
                rows.append(
                    {"op": op, "algorithm": algorithm if op == "all_reduce" else "", "delay_ms": delay_us / 1e3,
                     "size_bytes": size_bytes, "predicted_s": predicted, "measured_s": seconds,
                     "error": predicted / seconds - 1}
                )  # fmt: skip
    return rows


def predict_s(
    topology: Topology, schedule_of: Callable[[int], Schedule], speeds: dict[str, LinkSpeed]
) -> float:  # fmt: skip
    """Seconds of a collective: every phase waits for its farthest message and its busiest link."""
    return sum(
        phase.repeats * _phase_s(topology, phase, speeds)
        for phase in schedule_phases(schedule_of, range(topology.size), WIDTH)
    )


def _phase_s(topology: Topology, phase: Phase, speeds: dict[str, LinkSpeed]) -> float:
    flows: dict[tuple[str, str, str], int] = {}
    latency_s = 0.0
    for source, target in zip(phase.sources.tolist(), phase.targets.tolist(), strict=True):
        path = topology.path(source, target)
        latency_s = max(latency_s, *(speeds[tier].latency_s for tier, _, _ in path))
        for link in path:
            flows[link] = flows.get(link, 0) + 1
    return latency_s + max(
        number * phase.size_bytes / speeds[tier].bytes_per_s for (tier, _, _), number in flows.items()
    )


def schedules_of(topology: Topology, op: str, size_bytes: int, algorithm: str) -> Callable[[int], Schedule]:
    count = size_bytes // WIDTH
    if op in ("all_gather", "reduce_scatter"):
        count //= topology.size  # of one rank's part

    def schedule_of(rank: int) -> Schedule:
        cache = ScheduleCache(rank, topology)
        cache.algorithm = algorithm if op == "all_reduce" else None
        ends = [count // topology.size * number for number in range(topology.size + 1)]
        splits = ends * 2 if op == "all_to_all" else None  # where the part of each peer begins, sent and received
        return cache.get(op, count, WIDTH, splits=splits).schedule

    return schedule_of


def _link_speed(topology: Topology, ranks: tuple[int, int]) -> LinkSpeed:
    """Latency and rate of the slowest link between two hosts, from broadcasts of two sizes."""
    pair = replace(topology, places=tuple(topology.places[rank] for rank in ranks))
    seconds = _measure(pair, ("broadcast",), (SMALL, LARGE), "")
    small, large = seconds["broadcast", SMALL], seconds["broadcast", LARGE]
    return LinkSpeed(small, (LARGE - SMALL) / (large - small))


def _measure(
    topology: Topology, ops: tuple[str, ...], sizes: tuple[int, ...], algorithm: str
) -> dict[tuple[str, int], float]:
    """Median seconds of c3's collectives on the emulated links."""
    with tempfile.TemporaryDirectory(prefix="lakh-buildings-") as folder:
        path = Path(folder) / "topology.toml"
        path.write_text(to_toml(topology, links=True), encoding="utf-8")
        sweep = CommSweep(
            backends=("c3",),
            ops=ops,
            sizes=sizes,
            ranks=topology.size,
            emulate=str(path),
            algorithm=algorithm,
            repeats=3,
        )
        rows = bench_collectives(sweep)["rows"]
    return {(row["op"], row["size_bytes"]): row["median_us"] * 1e-6 for row in rows}
