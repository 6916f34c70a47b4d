"""Routing policies: the path of every flow, and how many flows a pair of GPUs has.

ecmp     a switch hashes the addresses: all queue pairs of two GPUs take one path
e-ecmp   the hash includes the destination queue pair: each queue pair has its own path
pinned   the uplink is the destination's port on its leaf; free of conflicts only while jobs own whole racks
te       central traffic engineering: conflict-free paths from an edge colouring; flows of dead links are moved to the
         least loaded path, each queue pair on its own (constrained shortest path)
flowlet  as e-ecmp, then each queue pair moves to the least loaded uplink of its own leaf: the leaf does not see the
         downlinks
spray    packets of every flow use all uplinks evenly: the uplinks of a group act as one

A dead link withdraws its paths: hashed flows are hashed again over the paths that remain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lakh.errors import InfeasiblePlan
from lakh.planner.compiled import compiled
from lakh.planner.fabric.edge_colouring import colour_edges
from lakh.planner.fabric.topology import FabricTopology, Ints

__all__ = ["ROUTINGS", "RoutedFlows", "route"]

ROUTINGS = ("ecmp", "pinned", "e-ecmp", "te", "flowlet", "spray")
MOST_HASHES = 64
"""Attempts to find a live path by hashing."""


@dataclass(frozen=True)
class RoutedFlows:
    """One row per flow; flows of a pair are consecutive."""

    pair: Ints
    """Index of the pair of GPUs that a flow belongs to."""
    paths: Ints
    links: NDArray[np.int32]
    num_pairs: int


def route(topology: FabricTopology, sources: Ints, targets: Ints, *, routing: str, qps: int, seed: int) -> RoutedFlows:
    """Paths of all pairs. A policy with one path per pair has one flow per pair, whatever the queue pairs."""
    if routing == "te":
        return _engineered(topology, sources, targets, qps)
    splits = routing in ("e-ecmp", "flowlet")
    pair = np.repeat(np.arange(len(sources)), qps if splits else 1)
    source, target = sources[pair], targets[pair]
    if routing == "spray":
        paths = np.zeros(len(pair), dtype=np.int64)
    else:
        queue = np.tile(np.arange(qps), len(sources)) if splits else np.zeros(len(pair), dtype=np.int64)
        paths = _hashed(topology, source, target, queue, seed)
    if routing == "pinned":  # only leaves pin; the stages above hash
        uplinks = topology.num_uplinks
        paths = paths // uplinks * uplinks + topology.slot_of(target) % uplinks
    paths = _avoid_dead(topology, source, target, paths, seed)
    if routing == "flowlet" and topology.stages:
        order = np.random.default_rng(seed).permutation(len(pair))
        paths = _least_loaded_uplink(topology, source, target, paths, order)
    return RoutedFlows(pair, paths, topology.links(source, target, paths), len(sources))


def _hash(*parts: Ints | int) -> NDArray[np.uint64]:
    """SplitMix64 of several integers."""
    mixed = np.zeros(1, dtype=np.uint64)
    for part in parts:
        mixed = mixed + np.asarray(part).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed


def _hashed(topology: FabricTopology, source: Ints, target: Ints, queue: Ints, seed: int) -> Ints:
    return (_hash(seed, source, target, queue) % np.uint64(topology.num_paths)).astype(np.int64)


def _uses_dead(topology: FabricTopology, source: Ints, target: Ints, paths: Ints) -> NDArray[np.bool_]:
    links = topology.links(source, target, paths)
    dead: NDArray[np.bool_] = np.any(topology.is_dead[links] & (links >= 0), axis=1)
    return dead


def _avoid_dead(topology: FabricTopology, source: Ints, target: Ints, paths: Ints, seed: int) -> Ints:
    """Hash the flows of withdrawn paths again."""
    if not topology.is_dead.any():
        return paths
    paths = paths.copy()
    dead = np.flatnonzero(_uses_dead(topology, source, target, paths))
    for attempt in range(MOST_HASHES):
        if not len(dead):
            return paths
        paths[dead] = _hashed(topology, source[dead], target[dead], dead + attempt, seed + 1 + attempt)
        dead = dead[_uses_dead(topology, source[dead], target[dead], paths[dead])]
    raise InfeasiblePlan(
        "routing", f"GPU {source[dead[0]]} has no live path to GPU {target[dead[0]]}", "kill fewer links"
    )


def _least_loaded_uplink(topology: FabricTopology, source: Ints, target: Ints, paths: Ints, order: Ints) -> Ints:
    """Two passes over all flows: each moves to the least loaded live uplink of its leaf."""
    first = topology.stages[0]
    leaf, to = topology.leaf_of(source), topology.leaf_of(target)
    climbs = np.flatnonzero(leaf != to)
    climbs = climbs[np.argsort(order[climbs], kind="stable")]
    lanes = first.num_paths
    up = topology.is_dead[first.first_up : first.first_down].reshape(-1, lanes)
    down = topology.is_dead[first.first_down : first.first_down + up.size].reshape(-1, lanes)
    chosen = _rebalance(leaf[climbs], to[climbs], paths[climbs] % lanes, up, down)
    paths = paths.copy()
    paths[climbs] = paths[climbs] // lanes * lanes + chosen
    return paths


@compiled
def _rebalance(
    leaf: Ints, to: Ints, lane: Ints, up_dead: NDArray[np.bool_], down_dead: NDArray[np.bool_]
) -> Ints:  # pragma: no cover
    load = np.zeros(up_dead.shape, dtype=np.int64)
    chosen = lane.copy()
    for flow in range(len(leaf)):
        load[leaf[flow], chosen[flow]] += 1
    for _ in range(2):
        for flow in range(len(leaf)):
            here, old = leaf[flow], chosen[flow]
            best = old
            for other in range(up_dead.shape[1]):
                is_live = not up_dead[here, other] and not down_dead[to[flow], other]
                if is_live and load[here, other] + 1 < load[here, best] + (best != old):
                    best = other
            load[here, old] -= 1
            load[here, best] += 1
            chosen[flow] = best
    return chosen


# --- traffic engineering ---


def _engineered(topology: FabricTopology, sources: Ints, targets: Ints, qps: int) -> RoutedFlows:
    paths = _coloured(topology, sources, targets)
    everyone = np.arange(len(sources))
    moved = np.flatnonzero(_uses_dead(topology, sources, targets, paths)) if topology.is_dead.any() else everyone[:0]
    if not len(moved):
        return RoutedFlows(everyone, paths, topology.links(sources, targets, paths), len(sources))
    # Pairs that keep their path stay one flow per queue pair, so that shares are counted alike.
    pair = np.repeat(everyone, qps)
    paths = np.repeat(paths, qps)
    is_moved = np.isin(pair, moved)
    links = topology.links(sources[pair], targets[pair], paths)
    load = np.bincount(links[~is_moved][links[~is_moved] >= 0], minlength=topology.num_links).astype(np.float64)
    load[topology.is_dead] = np.inf
    for flow in np.flatnonzero(is_moved):
        source, target = (np.full(topology.num_paths, end[pair[flow]]) for end in (sources, targets))
        choices = topology.links(source, target, np.arange(topology.num_paths))
        costs = np.where(choices >= 0, load[choices] / topology.capacity[choices].clip(1.0), 0.0)
        path = int(np.argmin(np.sort(costs, axis=1)[:, -2] * 1e-6 + costs.max(axis=1)))
        if not np.isfinite(costs[path]).all():
            found = f"GPU {source[0]} has no live path to GPU {target[0]}"
            raise InfeasiblePlan("routing", found, "kill fewer links")
        paths[flow] = path
        load[choices[path][choices[path] >= 0]] += 1
    return RoutedFlows(pair, paths, topology.links(sources[pair], targets[pair], paths), len(sources))


def _coloured(topology: FabricTopology, sources: Ints, targets: Ints) -> Ints:
    """Colour the flows of each stage inside every plane of the stage below, innermost first."""
    paths, planes = np.zeros(len(sources), dtype=np.int64), 1
    for stage in topology.stages:
        group, to = topology.group_of(sources, stage), topology.group_of(targets, stage)
        climbs = np.flatnonzero(group != to)
        fan_out = stage.num_paths // planes
        if fan_out > 1 and len(climbs):
            count = topology.num_groups(stage)
            plane = paths[climbs] % planes
            colours, _ = colour_edges(plane * count + group[climbs], plane * count + to[climbs])
            paths[climbs] += planes * (colours % fan_out)
        planes = stage.num_paths
    return paths
