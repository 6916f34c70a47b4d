"""Load of the cuts of a cluster: how many flows of a job leave one rack, zone or building at the same time.

A *cut* separates a group of `group` neighbouring GPUs from the rest. The functions count the flows that leave the
fullest group when every rank of the job sends at once, each at most at the rate of its NIC:

    ring       each rank sends to the same NIC's rank in the next node of its ring, `step` ranks away
    exchange   each rank sends evenly to all ranks of its block
    send       each rank sends to the next pipeline stage, `stride` ranks away

The closed forms are for packed ranks (rank r on GPU r) and broadcast over arrays of plans. `PlacedRanks` counts the
same flows for any list of GPUs; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lakh.errors import UserError
from lakh.planner.stacked import Array

__all__ = ["PlacedRanks", "exchange_crossing", "ring_crossing", "send_crossing"]


def ring_crossing(block: Array, step: Array, ranks: Array, group: Array) -> Array:
    """Rings of `block` neighbouring ranks.

    A group inside a ring is left by the `step` flows of its last node; if the ring's end is inside the group too, by
    the flows back to its beginning as well.
    """
    block, step, group = (np.asarray(value, dtype=float) for value in (block, step, group))
    is_inside, is_aligned = np.remainder(group, block) == 0, np.remainder(block, group) == 0
    flows = np.where(is_aligned, step, 2 * step)
    return np.where(is_inside | (ranks <= group), 0.0, np.minimum(flows, group))


def exchange_crossing(block: Array, ranks: Array, group: Array) -> Array:
    """Exchanges inside blocks of neighbouring ranks; the part of a rank's traffic that leaves counts as part of a flow.

    A block that a boundary cuts in half sends half of the traffic of each half across; a group has two boundaries.
    """
    block, group = np.asarray(block, dtype=float), np.asarray(group, dtype=float)
    is_inside = np.remainder(group, block) == 0
    flows = np.where(block > group, group * (1 - group / np.maximum(block, group)), block / 2)
    return np.where(is_inside | (ranks <= group), 0.0, np.minimum(flows, group))


def send_crossing(stride: Array, stages: Array, ranks: Array, group: Array) -> tuple[Array, Array]:
    """Flows between pipeline stages, and the share of the boundaries between stages that cross a cut of this size."""
    stride, group = np.asarray(stride, dtype=float), np.asarray(group, dtype=float)
    block = stride * stages
    is_inside = (np.remainder(group, block) == 0) | (np.asarray(ranks) <= group)
    flows = np.where(is_inside, 0.0, np.minimum(stride, group))
    cuts = np.maximum(np.ceil(block / group) - 1, 1.0)
    return flows, np.where(is_inside, 0.0, np.minimum(cuts / np.maximum(np.asarray(stages) - 1, 1.0), 1.0))


class PlacedRanks:
    """Ranks of one job on given GPUs: rank r runs on gpus[r]. Nodes hold neighbouring ranks, in any order of nodes."""

    def __init__(self, gpus: NDArray[np.int64], node_size: int) -> None:
        gpus = np.asarray(gpus, dtype=np.int64)
        if len(np.unique(gpus)) != len(gpus):
            raise UserError("placement", "puts two ranks on one GPU", "name each GPU once")
        whole = gpus[: len(gpus) // node_size * node_size].reshape(-1, node_size)
        if len(whole) and ((whole // node_size) != (whole[:, :1] // node_size)).any():
            todo = f"keep each {node_size} consecutive ranks on one node"
            raise UserError("placement", "splits the ranks of a node over several nodes", todo)
        self.gpus = gpus

    def crossing(self, sources: NDArray[np.int64], targets: NDArray[np.int64], group: float) -> float:
        """The most flows that leave one group of GPUs."""
        home, away = self.gpus[sources] // int(group), self.gpus[targets] // int(group)
        leaving = home[home != away]
        return float(np.bincount(leaving).max()) if len(leaving) else 0.0

    def ring_crossing(self, size: Array, stride: Array, in_node: Array) -> Callable[[Array], Array]:
        size, stride, in_node = int(size), int(stride), int(in_node)
        ranks = np.arange(len(self.gpus))
        index = ranks // stride % size
        targets = ranks + ((index + in_node) % size - index) * stride
        return lambda group: self.crossing(ranks, targets, float(group))

    def send_crossing(self, stride: Array, stages: Array, group: Array) -> tuple[float, float]:
        stride, stages = int(stride), int(stages)
        ranks = np.arange(len(self.gpus))
        stage = ranks // stride % stages
        sources = ranks[stage < stages - 1]
        if not len(sources):
            return 0.0, 0.0
        home, away = self.gpus[sources] // int(group), self.gpus[sources + stride] // int(group)
        boundaries = len(np.unique(stage[sources][home != away])) / (stages - 1)
        return self.crossing(sources, sources + stride, float(group)), boundaries
