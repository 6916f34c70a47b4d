"""Network technology between and inside sites: what routing, queue pairs, transport and wavelengths make of a link.

Inside a site, the slowest pair of a ring sets its pace; its share of a NIC comes from one simulation of the fabric per
routing and number of queue pairs. Between sites, flows are spread over the wavelengths of a link: hashes leave the
fullest wavelength with more flows than the mean, central traffic engineering and spraying do not.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np

from lakh.planner.across.sites import NetworkChoices, SiteLink
from lakh.planner.fabric.simulation import FabricScenario, simulate_fabric
from lakh.planner.fabric.transport import MTU_BYTES, goodput_share
from lakh.planner.stacked import Array
from lakh.spec.cluster import Cluster

__all__ = ["NetworkOption", "link_Bps", "network_options", "resend_s", "ring_share"]

EVEN_ROUTINGS = ("te", "spray")
"""Spread flows evenly over the wavelengths of a link."""
SHARED_PATH = ("ecmp", "pinned")
"""All queue pairs of two GPUs take one path."""
SAMPLE_GPUS = 1024
"""GPUs of the ring that is simulated inside a site."""


@dataclass(frozen=True)
class NetworkOption:
    routing: str
    qps: int
    transport: str
    wavelengths: int = 0
    """Added to each link."""


def network_options(choices: NetworkChoices) -> list[NetworkOption]:
    """All combinations; queue pairs matter only where each has a path of its own."""
    options = itertools.product(choices.routing, choices.qps, choices.transport, choices.extra_wavelengths)
    return [NetworkOption(*option) for option in options]


@cache
def ring_share(cluster: Cluster, routing: str, qps: int) -> float:
    """Share of a NIC that the slowest pair of a ring inside the site reaches."""
    if len(cluster.tiers) < 2:
        return 1.0
    node = cluster.node_size
    gpus = min(cluster.gpus, SAMPLE_GPUS) // node * node
    if gpus <= node:
        return 1.0
    return simulate_fabric(cluster, FabricScenario(gpus=gpus, routing=routing, qps=qps)).min_fraction


def link_Bps(
    link: SiteLink,
    capacity_Bps: float,
    option: NetworkOption,
    flows: Array,
    nic_Bps: float,
    balance: float | None = None,
) -> Array:
    """Bytes per second that `flows` pairs of GPUs get over a link together, at the rate of the slowest.

    `balance` replaces the estimate of how evenly the flows are spread by a simulated one.
    """
    wave_Bps = link.wavelength_Gbps * 1e9 / 8
    total = capacity_Bps + option.wavelengths * wave_Bps
    flows = np.maximum(np.asarray(flows, dtype=float), 1.0)
    if balance is None:
        waves = max(total / wave_Bps, 1.0)
        pieces = flows * (1 if option.routing in SHARED_PATH else option.qps)
        fullest = pieces / waves
        if option.routing not in EVEN_ROUTINGS:
            fullest = np.minimum(fullest + np.sqrt(2 * fullest * np.log(waves)), pieces)
        balance = pieces / waves / np.maximum(fullest, 1e-9)
    each = np.minimum(total * balance / flows, nic_Bps)
    return flows * each * goodput_share(option.transport, link.loss, each, 2 * link.delay_s)


def resend_s(link: SiteLink, option: NetworkOption, size_bytes: Array) -> Array:
    """Mean delay of a message by retransmission: a round trip whenever one of its packets is lost, and again for the
    packets that are sent again. Parity packets of erasure coding replace lost ones."""
    if option.transport == "erasure-coding" or not link.loss:
        return 0.0 * np.asarray(size_bytes, dtype=float)
    packets = np.ceil(np.asarray(size_bytes, dtype=float) / MTU_BYTES)
    rounds = sum(-np.expm1(-packets * link.loss**k) for k in (1, 2, 3))
    return 2 * link.delay_s * rounds
