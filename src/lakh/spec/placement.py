"""Which network tier each axis of a mesh talks over: a pure function of mesh and cluster, with reasons.

Ranks are numbered so that neighbours along tp are neighbours in the cluster, then cp, dp_shard, pp and dp_replicate:
what talks most lies innermost; `mesh.order` overrules that. An axis of n ranks at a stride of s spans n x s
neighbouring GPUs, and the innermost tier that holds these carries it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lakh.spec.cluster import Cluster, Tier
from lakh.spec.mesh import AXES, Mesh

__all__ = ["AxisPlace", "place_axes"]

_TALK = {
    "tp": "sums activations four times per block",
    "cp": "gathers keys and values once per block",
    "dp_shard": "gathers weights and scatters gradients once per block",
    "pp": "hands activations from stage to stage",
    "dp_replicate": "sums gradients once per step",
}


@dataclass(frozen=True)
class AxisPlace:
    axis: str
    ranks: int
    stride: int
    """Distance between neighbours along the axis, in ranks."""
    tier: str
    bandwidth_GBps: float
    """Of that tier, per GPU and direction, shared where it is oversubscribed."""
    reason: str


def place_axes(mesh: Mesh, cluster: Cluster) -> list[AxisPlace]:
    """The axes of a resolved mesh that have more than one rank, innermost first."""
    places, stride = [], 1
    for axis in reversed(mesh.order):
        ranks = getattr(mesh, axis)
        if ranks > 1:
            tier = cluster.tier_of(ranks * stride)
            inside = cluster.tiers[0]
            reason = f"{_TALK[axis]}; {ranks} ranks at a stride of {stride} span {ranks * stride} GPUs, one {tier.name}"
            if axis == "tp" and tier is not inside:
                reason += (
                    f": more than a {inside.name} of {inside.size}, where it would be {_times(inside, tier)} faster"
                )
            if mesh.order != AXES:
                reason += "; where it lies was asked for (mesh.order)"
            bandwidth = tier.bandwidth_GBps / tier.oversubscription
            places.append(AxisPlace(axis, ranks, stride, tier.name, bandwidth, reason))
        stride *= ranks
    return places


def _times(inner: Tier, outer: Tier) -> str:
    ratio = inner.bandwidth_GBps / (outer.bandwidth_GBps / outer.oversubscription)
    return f"{ratio:.0f} times"
