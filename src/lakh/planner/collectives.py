"""What a collective of one group costs when every group of the job does the same at the same time.

A group of n ranks, `stride` apart, has m members in each node and spans N = n/m nodes. A ring moves 2(n-1)/n of the
buffer through each rank; inside the node that goes over NVLink, between nodes over the NICs of the m members, which
no other group uses. A ring is a pipeline, so the slower of the two parts sets the pace. Latency is one launch, and as
much again for each doubling of the members in a node unless its switch reduces, and a tree of hops between nodes. What
a ring gets of a NIC is calibrated. A plain send gets nearly all of it; an exchange of all with all keeps every pair of
NICs busy for a moment only, and gets less than a ring does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lakh.planner.hardware import Hardware
from lakh.planner.shape import Array

__all__ = ["Group", "Network", "all_reduce_s", "all_to_all_s", "dispatch_s", "gather_s", "group", "point_to_point_s"]

SEND_SHARE = 0.95  # of the NIC's own rate: one large message from one GPU to one other, little but headers beside it
EXCHANGE_SHARE = 0.65  # of the NIC rate of a ring: many short flows that meet at receivers


@dataclass(frozen=True)
class Network:
    """Hardware together with the calibrated fractions of its rates."""

    hardware: Hardware
    node_efficiency: Array
    nic_efficiency: Array
    launch_s: Array


@dataclass(frozen=True)
class Group:
    size: Array
    in_node: Array
    """Members that share a node, m."""
    nodes: Array
    node_Bps: Array
    nic_Bps: Array
    """Of all m members together."""
    hop_s: Array
    start_s: Array
    """Of a ring: launch, and synchronisation of the members in a node."""


def group(net: Network, size: Array, stride: Array) -> Group:
    hw = net.hardware
    size = np.asarray(size, dtype=float)
    in_node = np.clip(np.floor(hw.node_size / np.asarray(stride, dtype=float)), 1.0, size)
    nodes = np.maximum(size / in_node, 1.0)
    span = size * stride
    return Group(
        size=size,
        in_node=in_node,
        nodes=nodes,
        node_Bps=hw.node_Bps * net.node_efficiency,
        nic_Bps=in_node * hw.outside_Bps(span) * net.nic_efficiency,
        hop_s=hw.outside_latency_s(span),
        start_s=net.launch_s * (1 + np.log2(in_node) * (1 - np.asarray(hw.switch_reduces))),
    )


def gather_s(net: Network, g: Group, size_bytes: Array) -> Array:
    """All-gather or reduce-scatter of a buffer of so many bytes (the whole of it, not a rank's part)."""
    inside = np.where(g.in_node > 1, (g.size - 1) / g.size * size_bytes / g.node_Bps, 0.0)
    outside = (g.nodes - 1) / g.nodes * size_bytes / g.nic_Bps
    latency = g.start_s + g.hop_s * np.log2(g.nodes)
    return np.where(g.size > 1, np.maximum(inside, outside) + latency, 0.0)


def all_reduce_s(net: Network, g: Group, size_bytes: Array) -> Array:
    """Reduce-scatter and all-gather in one call: twice the bytes, one launch."""
    one = gather_s(net, g, size_bytes)
    return np.where(g.size > 1, 2 * one - g.start_s, 0.0)


def all_to_all_s(net: Network, g: Group, size_bytes: Array) -> Array:
    """Every member sends `size_bytes` in all, spread evenly over the group."""
    inside = (g.in_node - 1) / g.size * size_bytes / g.node_Bps
    outside = (g.size - g.in_node) / g.size * size_bytes / (g.nic_Bps / g.in_node * EXCHANGE_SHARE)
    return np.where(g.size > 1, np.maximum(inside, outside) + net.launch_s + g.hop_s, 0.0)


def dispatch_s(net: Network, g: Group, token_bytes: Array, copies: Array, most_nodes: Array = 0.0) -> Array:
    """Every member sends each of its tokens to `copies` random members: once to a node, and from there to its members.

    `most_nodes` limits the nodes of one token, as some routers do; 0 is no limit.
    """
    nodes_reached = g.nodes * (1 - (1 - 1 / g.nodes) ** copies)
    nodes_reached = np.where(np.asarray(most_nodes) > 0, np.minimum(nodes_reached, most_nodes), nodes_reached)
    members_reached = g.size * (1 - (1 - 1 / g.size) ** copies)
    outside = token_bytes * nodes_reached * (g.nodes - 1) / g.nodes / (g.nic_Bps / g.in_node * EXCHANGE_SHARE)
    inside = token_bytes * members_reached * (g.in_node - 1) / g.in_node / g.node_Bps
    return np.where(g.size > 1, np.maximum(inside, outside) + net.launch_s + g.hop_s, 0.0)


def point_to_point_s(net: Network, size_bytes: Array, stride: Array) -> Array:
    """Every GPU sends so many bytes to the rank `stride` away, all at once."""
    hw = net.hardware
    crosses = np.asarray(stride) >= hw.node_size
    span = np.asarray(stride) * 2
    outside = size_bytes / (hw.outside_Bps(span) * SEND_SHARE) + hw.outside_latency_s(span)
    inside = size_bytes / (hw.node_Bps * net.node_efficiency) + hw.node_latency_s
    return np.where(crosses, outside, inside) + net.launch_s
