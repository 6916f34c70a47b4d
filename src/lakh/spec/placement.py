"""Which network tier carries the traffic of each mesh axis, with the reason.

Ranks are numbered so that neighbours along tp are neighbours in the cluster, then cp, dp_shard, pp and dp_replicate:
the axis that communicates most is innermost. `mesh.order` overrides that. An axis of n ranks at a stride of s spans
n x s neighbouring GPUs; the innermost tier that contains these GPUs carries its traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

from lakh.spec.cluster import Cluster
from lakh.spec.mesh import AXES, Mesh

__all__ = ["AxisPlacement", "place_axes"]

_TRAFFIC = {
    "tp": "sums activations four times per block",
    "cp": "gathers keys and values once per block",
    "dp_shard": "gathers weights and scatters gradients once per block",
    "pp": "sends activations from stage to stage",
    "dp_replicate": "sums gradients once per step",
}


@dataclass(frozen=True)
class AxisPlacement:
    axis: str
    ranks: int
    stride: int
    """Distance between neighbours along the axis, in ranks."""
    tier: str
    bandwidth_GBps: float
    """Per GPU and direction, after oversubscription."""
    reason: str


def place_axes(mesh: Mesh, cluster: Cluster) -> list[AxisPlacement]:
    """The axes of a resolved mesh that have more than one rank, innermost first."""
    placements, stride = [], 1
    for axis in reversed(mesh.order):
        ranks = getattr(mesh, axis)
        if ranks > 1:
            tier = cluster.tier_of(ranks * stride)
            inside = cluster.tiers[0]
            span = f"{ranks} ranks at a stride of {stride} span {ranks * stride} GPUs, one {tier.name}"
            reason = f"{_TRAFFIC[axis]}; {span}"
            bandwidth = tier.bandwidth_GBps / tier.oversubscription
            if axis == "tp" and tier is not inside:
                times = f"{inside.bandwidth_GBps / bandwidth:.0f} times"
                reason += f": outside a {inside.name} of {inside.size} GPUs, where bandwidth is {times} higher"
            if mesh.order != AXES:
                reason += "; placed by mesh.order"
            placements.append(AxisPlacement(axis, ranks, stride, tier.name, bandwidth, reason))
        stride *= ranks
    return placements
