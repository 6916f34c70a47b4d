"""Calibrated efficiencies: how much of each hardware peak a program reaches on one GPU type."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lakh.planner.stacked import Array

__all__ = ["Efficiency", "exposed_s"]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """At most twelve numbers per GPU type, with bounds and priors in calibration/fit.py."""

    gemm: Array = 0.78
    """Share of the dense peak that a large matrix product reaches."""
    gemm_knee: Array = 150.0
    """Inner size at which a product reaches half of that."""
    wave: Array = 0.5
    """Cost of a partly filled last wave of tiles: 0 nothing, 1 a whole wave."""
    attention: Array = 0.45
    """Share of the dense peak that FlashAttention-2 reaches with heads of 128."""
    memory: Array = 0.75
    """Share of the memory bandwidth that element-wise work reaches."""
    host_us: Array = 100.0
    """Host time of one layer's forward pass."""
    collective_us: Array = 30.0
    """Launch and synchronisation of one collective inside the model."""
    node: Array = 0.75
    """Share of the bandwidth inside a node."""
    nic: Array = 0.75
    """Share of the bandwidth between nodes."""
    interference: Array = 0.2
    """Seconds lost per second of communication that overlaps with computation."""
    low_precision: Array = 0.6
    """Share of the extra peak of fp8 and narrower types."""
    fixed_ms: Array = 10.0
    """Once per step: data, logging, gradient clipping, launch of the optimizer."""
    send: Array = 0.95
    """Share of a NIC that one large message reaches: it has little but headers beside it. Not calibrated."""


def exposed_s(communication_s: Array, computation_s: Array, efficiency: Efficiency) -> Array:
    """Overlapped communication: what exceeds the computation, plus the slowdown by the overlapped part, because
    concurrent kernels slow each other down."""
    hidden = np.minimum(communication_s, computation_s)
    return np.maximum(communication_s - computation_s, 0.0) + efficiency.interference * hidden
