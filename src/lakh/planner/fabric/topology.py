"""Switches and links of a cluster, numbered so that the path of a flow is a few integers.

A GPU has a NIC on a leaf switch and a port on its node's NVLink switch. Every tier of the cluster file above the leaf
is a stage of switches in parallel planes. A leaf has one uplink to each switch of the first stage; a switch of stage k
has `fan_out` uplinks into stage k + 1. So a flow's path is one number: `path % num_paths` of a stage is the uplink that
its group takes, on the way up at the source and, in the same plane, on the way down at the destination.

    nic up -> uplink of the leaf -> uplink of the zone -> downlink of the zone -> downlink of the leaf -> nic down

A flow turns around at the innermost tier that contains both ends. Links are directed; a dead cable kills both
directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lakh.errors import UserError
from lakh.spec.cluster import Cluster, Tier

__all__ = ["FabricTopology", "Floats", "Ints", "SwitchStage"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ASSUMED_LEAF_GPUS = 16
"""GPUs of a leaf switch where the cluster file has no tier of one switch: two nodes of eight, as in Meta's racks
(arXiv 2407.21783, 3.3.1)."""
MOST_LEAF_GPUS = 128
"""Ports towards GPUs of the largest single switch in use; a larger tier has several switches."""


@dataclass(frozen=True)
class SwitchStage:
    """Uplinks of all groups of one tier into the next stage of switches."""

    tier: str
    """Tier whose groups these uplinks connect, e.g. "zone" for links between racks and the zone's spine switches."""
    below: str
    """Tier of the groups below."""
    group_gpus: int
    """GPUs of one group below."""
    num_paths: int
    """Uplinks of one group below: the planes of this stage."""
    link_Bps: float
    latency_s: float
    """One way, between GPUs whose path turns around in this stage."""
    first_up: int
    first_down: int
    """Numbers of the first link of each direction; links of one group are consecutive."""


class FabricTopology:
    """The network of a cluster. `pooled` merges the uplinks of a group into one, as packet spraying uses them."""

    def __init__(self, cluster: Cluster, *, uplinks: int | None = None, pooled: bool = False) -> None:
        self.cluster, self.pooled = cluster, pooled
        self.node = cluster.tiers[0]
        self.num_gpus = cluster.gpus
        self.leaf, above, self.leaf_is_assumed = _leaf_tier(cluster)
        self.nic_Bps = self.leaf.bandwidth_GBps * 1e9
        self.leaf_gpus = self.leaf.size // self.node.size if self.leaf.rails else self.leaf.size
        self.stages = self._stages(above, uplinks)
        count = self.stages[-1].first_down if self.stages else 4 * self.num_gpus
        last = self.stages[-1] if self.stages else None
        self.num_links = count + (self.num_groups(last) * last.num_paths if last else 0)
        self.capacity = self._capacities()
        self.is_dead = np.zeros(self.num_links, dtype=np.bool_)

    def _stages(self, above: tuple[Tier, ...], uplinks: int | None) -> tuple[SwitchStage, ...]:
        stages: list[SwitchStage] = []
        first, below, group_gpus, paths = 4 * self.num_gpus, self.leaf, self.leaf_gpus, 1
        for number, tier in enumerate(above):
            capacity = group_gpus * tier.bandwidth_GBps * 1e9 / tier.oversubscription
            wanted = uplinks if number == 0 and uplinks else below.uplinks
            if wanted:  # stated links have a NIC's rate each, whatever the oversubscription
                capacity = wanted * self.nic_Bps
            # Whole links of a NIC's rate or a little more; a path never has less, unless there are too few for all.
            paths *= max(int(capacity / self.nic_Bps * (1 + 1e-9)) // paths, 1)
            num_paths = 1 if self.pooled else paths
            groups = -(-self.num_gpus // group_gpus)
            stages.append(
                SwitchStage(
                    tier.name, below.name, group_gpus, num_paths, capacity / num_paths, tier.latency_s,
                    first, first + groups * num_paths,
                )
            )  # fmt: skip
            first += 2 * groups * num_paths
            below, group_gpus = tier, tier.size
        return tuple(stages)

    def num_groups(self, stage: SwitchStage) -> int:
        return -(-self.num_gpus // stage.group_gpus)

    def _capacities(self) -> Floats:
        gpus = self.num_gpus
        capacity = np.empty(self.num_links)
        capacity[: 2 * gpus] = self.nic_Bps
        capacity[2 * gpus : 4 * gpus] = self.node.bandwidth_Bps
        for stage in self.stages:
            capacity[stage.first_up : 2 * stage.first_down - stage.first_up] = stage.link_Bps
        return capacity

    @property
    def num_paths(self) -> int:
        """Distinct paths between two GPUs of different groups of the last stage."""
        return self.stages[-1].num_paths if self.stages else 1

    @property
    def num_uplinks(self) -> int:
        """Uplinks of a leaf."""
        return self.stages[0].num_paths if self.stages else 1

    # --- where GPUs are ---

    def leaf_of(self, gpus: Ints) -> Ints:
        if self.leaf.rails:
            return gpus // self.leaf.size * self.node.size + gpus % self.node.size
        return gpus // self.leaf_gpus

    def slot_of(self, gpus: Ints) -> Ints:
        """Port of a GPU on its leaf."""
        if self.leaf.rails:
            return gpus % self.leaf.size // self.node.size
        return gpus % self.leaf_gpus

    def group_of(self, gpus: Ints, stage: SwitchStage) -> Ints:
        return self.leaf_of(gpus) if stage is self.stages[0] else gpus // stage.group_gpus

    def turn_of(self, sources: Ints, targets: Ints) -> Ints:
        """Stages that a flow climbs: 0 stays on the leaf, -1 inside the node."""
        turn = np.zeros(len(sources), dtype=np.int64)
        for number, stage in enumerate(self.stages, start=1):
            turn[self.group_of(sources, stage) != self.group_of(targets, stage)] = number
        turn[sources // self.node.size == targets // self.node.size] = -1
        return turn

    @cached_property
    def latencies_s(self) -> Floats:
        """Latency by turn; the last entry is the node's, so that turn -1 finds it."""
        return np.array([self.leaf.latency_s, *(stage.latency_s for stage in self.stages), self.node.latency_s])

    # --- links ---

    def links(self, sources: Ints, targets: Ints, paths: Ints) -> NDArray[np.int32]:
        """Links of each flow in the order of travel, -1 where it has none."""
        gpus, turn = self.num_gpus, self.turn_of(sources, targets)
        found = np.full((len(sources), 2 + 2 * len(self.stages)), -1, dtype=np.int32)
        is_inside = turn < 0
        found[:, 0] = np.where(is_inside, 2 * gpus + sources, sources)
        found[:, -1] = np.where(is_inside, 3 * gpus + targets, gpus + targets)
        for number, stage in enumerate(self.stages, start=1):
            climbs = turn >= number
            lane = paths[climbs] % stage.num_paths
            up = self.group_of(sources[climbs], stage) * stage.num_paths + lane
            down = self.group_of(targets[climbs], stage) * stage.num_paths + lane
            found[climbs, number] = stage.first_up + up
            found[climbs, -1 - number] = stage.first_down + down
        return found

    def link_name(self, link: int) -> str:
        """A link in words: "rack 12 uplink 3 to zone"."""
        kinds = ("NIC of GPU {} up", "NIC of GPU {} down", "NVLink of GPU {} up", "NVLink of GPU {} down")
        if link < 4 * self.num_gpus:
            return kinds[link // self.num_gpus].format(link % self.num_gpus)
        stage = next(stage for stage in reversed(self.stages) if link >= stage.first_up)
        is_down = link >= stage.first_down
        group, lane = divmod(link - (stage.first_down if is_down else stage.first_up), stage.num_paths)
        what = "uplinks" if self.pooled else f"uplink {lane}"
        return f"{stage.below} {group} {what} {'from' if is_down else 'to'} {stage.tier}"

    # --- faults ---

    def kill_uplinks(self, groups: Ints, lanes: Ints, stage: int = 0) -> None:
        """Cables between groups and the switches above them: both directions."""
        at = self.stages[stage]
        for first in (at.first_up, at.first_down):
            if self.pooled:
                np.subtract.at(self.capacity, first + groups, at.link_Bps / self._cables(stage))
            else:
                links = first + groups * at.num_paths + lanes
                self.is_dead[links] = True
                self.capacity[links] = 0.0

    def kill_switch(self, lane: int, zone: int = 0) -> None:
        """One switch of the first stage: its link to every leaf of its group."""
        first, groups = self.stages[0], self.num_groups(self.stages[0])
        per_zone = groups if len(self.stages) == 1 else self.stages[1].group_gpus // self.leaf_gpus
        leaves = np.arange(zone * per_zone, min((zone + 1) * per_zone, groups))
        self.kill_uplinks(leaves, np.full(len(leaves), lane % max(self._cables(0), first.num_paths)))

    def _cables(self, stage: int) -> int:
        return round(self.stages[stage].link_Bps / self.nic_Bps) if self.pooled else self.stages[stage].num_paths

    def slow_nics(self, gpus: Ints, factor: float) -> None:
        self.capacity[gpus] *= factor
        self.capacity[self.num_gpus + gpus] *= factor


def _leaf_tier(cluster: Cluster) -> tuple[Tier, tuple[Tier, ...], bool]:
    """The tier of one leaf switch, the tiers above it, and whether the leaf was assumed."""
    if len(cluster.tiers) == 1:
        raise UserError(f"cluster {cluster.name}", "has one tier and no network between nodes", "choose a larger one")
    node, first, *above = cluster.tiers
    if first.rails or first.size <= MOST_LEAF_GPUS:
        return first, tuple(above), False
    size = node.size * max(ASSUMED_LEAF_GPUS // node.size, 1)
    leaf = Tier(name="rack", size=size, bandwidth_GBps=first.bandwidth_GBps, latency_us=first.latency_us)
    return leaf, tuple(cluster.tiers[1:]), True
