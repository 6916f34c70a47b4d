"""Place the nodes of a job on the free nodes of a cluster, and compare with packed, random and spread placements.

minimum-cut  fewest bytes between zones, then between racks inside each zone (minimum_cut.py)
packed       ranks in order on free nodes in order
random       ranks in order on free nodes in any order
arnold       fewest zones per data group or per pipeline, whatever they send (after Arnold, arXiv 2509.15940)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lakh.errors import InfeasiblePlan
from lakh.planner.calibration.fit import calibration_for
from lakh.planner.calibration.program_factor import LAKH, program_factor
from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.fabric.topology import Ints
from lakh.planner.placement.cut_load import PlacedRanks
from lakh.planner.placement.job_grid import JobGrid, job_grid
from lakh.planner.placement.minimum_cut import greedy_counts, minimum_cut_counts
from lakh.planner.timing.step_time import step_time
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model

__all__ = ["STRATEGIES", "JobPlacement", "PlacementReport", "compare_placements"]

STRATEGIES = ("minimum-cut", "packed", "random", "arnold")


@dataclass(frozen=True)
class JobPlacement:
    strategy: str
    nodes: Ints
    """Node of the cluster for every node of the job: [stage, column]."""
    cuts: dict[str, float]
    """Tier -> bytes per step between its groups."""
    step_s: float

    def as_dict(self) -> dict[str, object]:
        return {"cuts_bytes": self.cuts, "step_s": self.step_s}


@dataclass(frozen=True)
class PlacementReport:
    best: JobPlacement
    baselines: dict[str, JobPlacement]
    tier: str
    """Whose groups the cut is counted between: the outermost that the cluster has several of."""

    @property
    def cut(self) -> float:
        return self.best.cuts[self.tier]


def compare_placements(
    model: Model, plan: ExecutionPlan, cluster: Cluster, free: Ints, *, seed: int = 1
) -> PlacementReport:
    """All strategies on the same free nodes."""
    grid = job_grid(model, plan, cluster.node_size)
    if grid.nodes > len(free):
        found = f"needs {grid.nodes} nodes, {len(free)} are free"
        raise InfeasiblePlan("the job", found, "use fewer GPUs, or wait for other jobs")
    sizes = {tier.name: tier.size // cluster.node_size for tier in cluster.tiers[1:-1]}
    if not sizes:
        raise InfeasiblePlan(f"cluster {cluster.name}", "has no racks or zones: every placement is the same", "omit it")
    shuffled = np.random.default_rng(seed).permutation(free)
    shape = (grid.stages, grid.width)
    layouts = {
        "minimum-cut": _recursive(grid, free, list(sizes.values())),
        "packed": free[: grid.nodes].reshape(shape),
        "random": shuffled[: grid.nodes].reshape(shape),
        "arnold": _recursive(JobGrid(*shape, 1.0, 1.0 / grid.width), free, list(sizes.values())[-1:], exact=False),
    }
    timed = {name: _timed(name, model, plan, cluster, grid, nodes, sizes) for name, nodes in layouts.items()}
    best = min((timed["minimum-cut"], timed["packed"]), key=lambda one: (one.cuts[next(reversed(sizes))], one.step_s))
    baselines = {name: one for name, one in timed.items() if name != "minimum-cut"}
    return PlacementReport(best, baselines, next(reversed(sizes)))


def _timed(
    name: str, model: Model, plan: ExecutionPlan, cluster: Cluster, grid: JobGrid, nodes: Ints, sizes: dict[str, int]
) -> JobPlacement:
    calibration = calibration_for(cluster.gpu.family)[0]
    gpus = (nodes.ravel()[:, None] * cluster.node_size + np.arange(cluster.node_size)).ravel()
    step = step_time(model, plan, cluster, calibration.efficiency, PlacedRanks(gpus, cluster.node_size))
    step = program_factor(LAKH, cluster.gpu.family, calibration).apply(step)
    cuts = {tier: grid.cut_bytes(nodes // size) for tier, size in sizes.items()}
    return JobPlacement(name, nodes, cuts, float(step.total_s))


def _recursive(grid: JobGrid, free: Ints, sizes: list[int], *, exact: bool = True) -> Ints:
    """Split the grid over the groups of the outermost tier, then inside each group over those of the next one."""
    nodes = np.full((grid.stages, grid.width), -1, dtype=np.int64)
    everything = [np.arange(grid.width) for _ in range(grid.stages)]
    _fill(nodes, grid, everything, free, sizes[::-1], exact)
    return nodes


def _fill(nodes: Ints, grid: JobGrid, columns: list[Ints], free: Ints, sizes: list[int], exact: bool) -> None:
    """Place columns[stage] of every stage on the free nodes; `sizes` are nodes of a group, outermost tier first."""
    counts = np.array([len(some) for some in columns])
    if not sizes:
        taken = 0
        for stage, some in enumerate(columns):
            nodes[stage, some] = free[taken : taken + len(some)]
            taken += len(some)
        return
    groups, room = np.unique(free // sizes[0], return_counts=True)
    split = _split(grid, counts, room, exact)
    begins = np.zeros(len(counts), dtype=np.int64)
    for number, group in enumerate(groups):
        here = [columns[s][begins[s] : begins[s] + split[s, number]] for s in range(len(counts))]
        begins += split[:, number]
        if split[:, number].any():
            _fill(nodes, grid, here, free[free // sizes[0] == group], sizes[1:], exact)


def _split(grid: JobGrid, counts: Ints, room: Ints, exact: bool) -> Ints:
    whole = np.flatnonzero(room >= counts.sum())
    if len(whole):  # the tightest group that holds all of it
        found = np.zeros((len(counts), len(room)), dtype=np.int64)
        found[:, whole[np.argmin(room[whole])]] = counts
        return found
    if exact:
        return minimum_cut_counts(counts, room, grid.ring_bytes, grid.send_bytes)
    return greedy_counts(counts, room, grid.ring_bytes, grid.send_bytes)
