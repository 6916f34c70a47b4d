"""What a cluster can do, as rates in SI units: the planner's view of `spec.Cluster`.

Rates are peaks; how much of them a real program gets is calibrated (`calibration.py`). A group of ranks that leaves a
node uses the NICs of those of its members that sit there: groups that share a node share its NICs, which is why the
rate of a group is the rate per GPU times its members in the node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lakh.planner.shape import Array
from lakh.spec.cluster import Cluster

__all__ = ["Hardware", "Level", "hardware_of"]


@dataclass(frozen=True)
class Level:
    """A network tier outside the node: how many GPUs it joins, and what each of them gets across it."""

    size: Array
    rate_Bps: Array
    latency_s: Array


@dataclass(frozen=True, kw_only=True)
class Hardware:
    kind: str
    """Which calibration applies: "A100", "H100", "B200", ..."""
    peak_FLOPs: Array
    """Dense bf16, as the data sheet has it."""
    memory_bytes: Array
    memory_Bps: Array
    processors: Array
    """Streaming multiprocessors: how many tiles of a matrix product are worked on at once."""
    tile_columns: Array
    """Width of the tiles that large matrix products are cut into: see TILE_COLUMNS."""
    node_size: Array
    node_Bps: Array
    node_latency_s: Array
    levels: tuple[Level, ...] = ()
    switch_reduces: Array = 0.0
    """1 where the node's switches add up what passes them: see SWITCH_REDUCES."""
    sustained: Array = 1.0
    """Speed of arithmetic beyond what the peak says, by the part's power limit: see `sustained`."""
    attention_gain: Array = 1.0
    """Speed of attention kernels written for this part over FlashAttention-2: see ATTENTION_GAIN."""
    softmax_knee: Array = 0.0
    """Size of a head whose products take as long as the exponentials of its scores: see SOFTMAX_KNEE."""
    host_Bps: Array = 25e9
    """Between GPU and host memory, per GPU and direction: PCIe 4.0 x16 with its usual losses."""

    @property
    def arithmetic_FLOPs(self) -> Array:
        return self.peak_FLOPs * self.sustained

    def outside_Bps(self, span: Array) -> Array:
        """Rate per GPU and direction of a group that spans so many neighbouring GPUs, beyond one node."""
        rate = np.asarray(self.node_Bps, dtype=float)
        reached: Array = np.asarray(span) <= self.node_size
        for level in self.levels:
            rate = np.where(reached, rate, np.minimum(rate, level.rate_Bps))
            reached = reached | (np.asarray(span) <= level.size)
        return rate

    def outside_latency_s(self, span: Array) -> Array:
        latency = np.asarray(self.node_latency_s, dtype=float)
        reached: Array = np.asarray(span) <= self.node_size
        for level in self.levels:
            latency = np.where(reached, latency, level.latency_s)
            reached = reached | (np.asarray(span) <= level.size)
        return latency


# Streaming multiprocessors: NVIDIA's architecture white papers (V100, A100, H100, Blackwell).
PROCESSORS = {"V100": 80, "A100": 108, "H100": 132, "H200": 132, "B200": 148, "GB200": 148, "B300": 148, "GB300": 148}

# cuBLAS's usual tiles of large products are 128 x 256 or 256 x 256 from the H100 on; on older parts 256 x 128 and less.
TILE_COLUMNS = {"H100": 256.0, "H200": 256.0, "B200": 256.0, "GB200": 256.0, "B300": 256.0, "GB300": 256.0}

# NVSwitch from its third generation on (H100) reduces and copies in the switch (NVIDIA's H100 white paper), so that the
# members of a node meet there once; before it, a ring or tree takes them one after another.
SWITCH_REDUCES = {"H100", "H200", "B200", "GB200", "B300", "GB300"}

# Parts of one design run at their power limit under matrix products, and clocks there follow the power: at the lowest
# voltage it is proportional to the clock. So they sustain less or more than their data-sheet peaks say. NVIDIA's data
# sheets have 1,000 W and 2,250 TFLOP/s of dense bf16 for B200, and for its relatives:
POWER_W = {"B200": 1000.0, "B300": 1100.0, "GB200": 1200.0, "GB300": 1400.0}


def sustained(kind: str, peak_TFLOPs: float) -> float:
    """Speed of arithmetic relative to a B200's share of its own peak; 1 for parts that stand alone."""
    return POWER_W[kind] / POWER_W["B200"] * 2250.0 / peak_TFLOPs if kind in POWER_W else 1.0


# FlashAttention-3 beside FlashAttention-2 on an H100: 1.5 to 2.0 times forward; 1.5 to 1.75 backward, which is 2.5 of
# 3.5 parts of the work (arXiv 2407.08608). cuDNN 9 lies near it. On other parts all measured programs have one kind.
ATTENTION_GAIN = {"H100": 1.66, "H200": 1.66}

# A multiprocessor makes 16 exponentials per clock (CUDA programming guide, arithmetic throughput) beside 4,096 dense
# FLOPs on an H100, 8,192 on Blackwell; a score takes one exponential and four FLOPs per element of a head. Older parts
# have products slow enough to hide them (arXiv 2407.08608 names the gap; fits of A100 rows find no such term).
SOFTMAX_KNEE = {"H100": 64.0, "H200": 64.0, "B200": 128.0, "GB200": 128.0, "B300": 128.0, "GB300": 128.0}


def kind_of(name: str) -> str:
    """The family of a part's name: "H100-SXM" is an H100."""
    for kind in sorted(PROCESSORS, key=len, reverse=True):
        if name.upper().startswith(kind):
            return kind
    return name


def hardware_of(cluster: Cluster) -> Hardware:
    node, *outside = cluster.tiers
    kind = kind_of(cluster.gpu.kind)
    return Hardware(
        kind=kind,
        peak_FLOPs=cluster.gpu.dense_bf16_TFLOPs * 1e12,
        switch_reduces=float(kind in SWITCH_REDUCES),
        sustained=sustained(kind, cluster.gpu.dense_bf16_TFLOPs),
        attention_gain=ATTENTION_GAIN.get(kind, 1.0),
        softmax_knee=SOFTMAX_KNEE.get(kind, 0.0),
        memory_bytes=cluster.gpu.memory_GiB * 2**30,
        memory_Bps=cluster.gpu.memory_bandwidth_GBps * 1e9,
        processors=float(PROCESSORS.get(kind, 100)),
        tile_columns=TILE_COLUMNS.get(kind, 128.0),
        node_size=float(node.size),
        node_Bps=node.bandwidth_GBps * 1e9,
        node_latency_s=node.latency_us * 1e-6,
        levels=tuple(
            Level(float(t.size), t.bandwidth_GBps * 1e9 / t.oversubscription, t.latency_us * 1e-6) for t in outside
        ),
    )
