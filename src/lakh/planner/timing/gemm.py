"""Seconds of one matrix product: the slower of arithmetic and memory traffic.

    arithmetic = 2 m k n' / (FLOP/s x efficiency),  efficiency = gemm x wave fill x k / (k + gemm_knee)

n' is n padded to whole tiles where the product is wide; the wave fill is the share of the multiprocessors that the last
wave of tiles keeps busy, weighted by the calibrated `wave` (spec/gemm_waves.py).
"""

from __future__ import annotations

import numpy as np

from lakh.planner.stacked import Array
from lakh.planner.timing.efficiency import Efficiency
from lakh.spec.gemm_waves import num_waves
from lakh.spec.gpu import Gpu

__all__ = ["gemm_s"]

SMALLEST_TILE = (128.0, 128.0)  # kernels that share a product among all multiprocessors go down to this
WIDE = 4.0  # products at least this many tiles wide are cut into the part's usual tiles, and the last one is padded


def gemm_s(m: Array, k: Array, n: Array, gpu: Gpu, efficiency: Efficiency, speed: Array = 1.0) -> Array:
    """Product of (m, k) by (k, n); `speed` is the peak relative to bf16."""
    tile_columns = gpu.traits.tile_columns
    padded = np.where(n >= WIDE * tile_columns, np.ceil(n / tile_columns) * tile_columns, n)
    waves = np.maximum(num_waves(m, n, SMALLEST_TILE, gpu.traits.processors, np.ceil), 1.0 / gpu.traits.processors)
    filled = waves / (waves + efficiency.wave * (np.ceil(waves) - waves))
    reached = efficiency.gemm * filled * k / (k + efficiency.gemm_knee)
    arithmetic = 2 * m * k * padded / (gpu.sustained_FLOPs * speed * reached)
    traffic = 2 * (m * k + k * n + m * n) / (gpu.memory_Bps * efficiency.memory)
    return np.maximum(arithmetic, traffic)
