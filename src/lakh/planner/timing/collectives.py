"""Seconds of a collective when every group of the job runs it at the same time.

Bytes come from `spec.collective_cost`, the closed form of c3's schedules. A group of n ranks, `stride` apart,
has m members in each node and spans N = n/m nodes. The m members open m rings (as NCCL's channels do): each rank passes
a ring's (n-1)/n of the buffer on inside the node, and its NIC carries the hierarchical share, (N-1)/N of 1/m of the
buffer. Rings are pipelined, so the slower of the two parts sets the pace.

Between racks, zones and buildings the flows that cross share the uplinks that oversubscription leaves. placement/
counts them: a node-ordered ring crosses a zone's boundary with one flow per NIC of a node, however long it is, and a
pipeline with all ranks of a stage.

Latency is one launch, plus one more for each doubling of the members in a node unless its switch reduces, plus a tree
of hops between nodes. Bandwidth efficiency of a ring is calibrated. A plain send reaches nearly all of a NIC; an
all-to-all keeps each pair of NICs busy only for a moment, and reaches less than that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise

import numpy as np

from lakh.planner.placement.cut_load import PlacedRanks, exchange_crossing, ring_crossing, send_crossing
from lakh.planner.stacked import Array
from lakh.planner.timing.efficiency import Efficiency
from lakh.spec.cluster import Cluster
from lakh.spec.collective_cost import collective_cost

__all__ = ["Fabric", "RankGroup", "all_gather_s", "all_reduce_s", "all_to_all_s", "dispatch_s", "send_s"]

# Of a plain send: many short flows that collide at receivers. DeepEP reports 43 to 58 GB/s between nodes, with NICs of
# 50 GB/s.
ALL_TO_ALL_SHARE = 0.8


class Fabric:
    """The network of a cluster, at calibrated efficiency."""

    def __init__(
        self, cluster: Cluster, efficiency: Efficiency, ranks: Array, placed: PlacedRanks | None = None
    ) -> None:
        self.gpu, self.placed = cluster.gpu, placed
        self.ranks = np.asarray(ranks, dtype=float)
        self.node, *self.tiers = cluster.tiers
        self.node_Bps = self.node.bandwidth_Bps * efficiency.node
        self.nic_efficiency, self.send_efficiency = efficiency.nic, efficiency.send
        self.launch_s = efficiency.collective_us * 1e-6

    def outside(self, crossing: Callable[[Array], Array]) -> tuple[Array, Array]:
        """Rate of a NIC and latency of flows of which `crossing(size)` leave a group of `size` GPUs at once.

        The slowest cut that any of them crosses sets the rate.
        """
        rate, latency = np.asarray(self.node.bandwidth_Bps, dtype=float), np.asarray(self.node.latency_s, dtype=float)
        for inner, tier in pairwise((self.node, *self.tiers)):
            flows = crossing(inner.size)
            share = inner.size * tier.bandwidth_Bps / np.maximum(flows, 1.0)
            rate = np.where(flows > 0, np.minimum(rate, np.minimum(tier.bandwidth_GBps * 1e9, share)), rate)
            latency = np.where(flows > 0, tier.latency_s, latency)
        return rate, latency

    def ring(self, size: Array, stride: Array, in_node: Array) -> tuple[Array, Array]:
        """Rate of a NIC and latency between nodes, of rings of `size` ranks, `stride` apart, all at once."""
        if self.placed is not None:
            return self.outside(self.placed.ring_crossing(size, stride, in_node))
        return self.outside(lambda group: ring_crossing(size * stride, in_node * stride, self.ranks, group))

    def exchange(self, size: Array, stride: Array) -> tuple[Array, Array]:
        """The same for an exchange of every rank with every other of its group."""
        return self.outside(lambda group: exchange_crossing(size * stride, self.ranks, group))

    def group(self, size: Array, stride: Array) -> RankGroup:
        return RankGroup(self, np.asarray(size, dtype=float), stride)


class RankGroup:
    """`size` ranks at a distance of `stride`."""

    def __init__(self, fabric: Fabric, size: Array, stride: Array) -> None:
        self.fabric, self.stride = fabric, stride
        self.size, self.node_Bps, self.launch_s = size, fabric.node_Bps, fabric.launch_s
        self.in_node = np.clip(np.floor(fabric.node.size / np.asarray(stride, dtype=float)), 1.0, size)  # members, m
        self.nodes = np.maximum(size / self.in_node, 1.0)
        rate, self.hop_s = fabric.ring(size, stride, self.in_node)
        self.nic_Bps = rate * fabric.nic_efficiency  # of each member
        ring = collective_cost("all_gather", "flat", 1.0, (size,)).bytes_sent  # any algorithm moves as much in all
        nic = collective_cost("all_gather", "hierarchical", 1.0 / self.in_node, (self.nodes,)).bytes_sent
        inside = np.where(self.in_node > 1, ring / self.node_Bps, 0.0)
        sync = 1 + np.log2(self.in_node) * (1 - np.asarray(fabric.gpu.traits.switch_reduces))
        self.start_s = self.launch_s * sync  # of a ring: launch, and synchronisation of the members in a node
        self.gather_latency_s = self.start_s + self.hop_s * np.log2(self.nodes)
        self.gather_s_per_byte = np.maximum(inside, nic / self.nic_Bps)

    @cached_property
    def exchange(self) -> tuple[Array, Array]:
        """Rate of a NIC and latency of an exchange of every rank with every other; few groups have one."""
        rate, hop_s = self.fabric.exchange(self.size, self.stride)
        return rate * self.fabric.send_efficiency * ALL_TO_ALL_SHARE, hop_s


def all_gather_s(group: RankGroup, size_bytes: Array) -> Array:
    """All-gather or reduce-scatter of a whole buffer of `size_bytes`."""
    return np.where(group.size > 1, size_bytes * group.gather_s_per_byte + group.gather_latency_s, 0.0)


def all_reduce_s(group: RankGroup, size_bytes: Array) -> Array:
    """Reduce-scatter and all-gather in one call: twice the bytes, one launch."""
    return np.where(group.size > 1, 2 * all_gather_s(group, size_bytes) - group.start_s, 0.0)


def all_to_all_s(group: RankGroup, size_bytes: Array) -> Array:
    """Every member sends `size_bytes`, spread evenly over the group."""
    node, outer = collective_cost("all_to_all", "flat", size_bytes, (group.in_node, group.nodes)).tiers
    return _exchange_s(group, node.bytes_sent, outer.bytes_sent)


def dispatch_s(group: RankGroup, token_bytes: Array, copies: Array, most_nodes: Array = 0.0) -> Array:
    """Every member sends each of its tokens to `copies` random members: once to a node, and from there to its members.

    `most_nodes` limits the nodes of one token, as some routers do; 0 is no limit.
    """
    nodes_reached = group.nodes * (1 - (1 - 1 / group.nodes) ** copies)
    nodes_reached = np.where(np.asarray(most_nodes) > 0, np.minimum(nodes_reached, most_nodes), nodes_reached)
    members_reached = group.size * (1 - (1 - 1 / group.size) ** copies)
    outside = token_bytes * nodes_reached * (group.nodes - 1) / group.nodes
    inside = token_bytes * members_reached * (group.in_node - 1) / group.in_node
    return _exchange_s(group, inside, outside)


def _exchange_s(group: RankGroup, node_bytes: Array, nic_bytes: Array) -> Array:
    nic_Bps, hop_s = group.exchange
    slower = np.maximum(node_bytes / group.node_Bps, nic_bytes / nic_Bps)
    return np.where(group.size > 1, slower + group.launch_s + hop_s, 0.0)


def send_s(fabric: Fabric, size_bytes: Array, stride: Array, stages: Array) -> tuple[Array, Array]:
    """Every GPU sends `size_bytes` to the rank `stride` away, the next of `stages`, all at once: over the slowest
    boundary between two stages, and on average over all boundaries."""
    inside = size_bytes / fabric.node_Bps + fabric.node.latency_s
    leaves_node = np.asarray(stride) >= fabric.node.size
    first = fabric.tiers[0] if fabric.tiers else fabric.node
    slowest = np.where(
        leaves_node, size_bytes / (first.bandwidth_Bps * fabric.send_efficiency) + first.latency_s, inside
    )
    mean = slowest
    for inner, tier in pairwise(fabric.tiers):
        if fabric.placed is not None:
            flows, boundaries = fabric.placed.send_crossing(stride, stages, inner.size)
        else:
            flows, boundaries = send_crossing(stride, stages, fabric.ranks, inner.size)
        share = inner.size * tier.bandwidth_Bps / np.maximum(flows, 1.0)
        rate = np.minimum(tier.bandwidth_GBps * 1e9, share)
        over = np.where(flows > 0, size_bytes / (rate * fabric.send_efficiency) + tier.latency_s, slowest)
        slowest = np.maximum(slowest, over)
        mean = mean + boundaries * np.maximum(over - mean, 0.0)
    return slowest + fabric.launch_s, mean + fabric.launch_s
