"""Wave quantisation of matrix products: tiles are computed in waves of one tile per multiprocessor.

A product of M rows and N columns has a few thousand tiles; in the last wave some multiprocessors are idle. With 2,048
columns and 132 multiprocessors, 8 or 16 sequences of 4,096 tokens fill 15.5 or 31.03 waves and take 16 or 32; 17 fill
32.97 of 33. Measured on an H200 with 1.245 billion parameters (2026-11-15): 55.0 % MFU with 8, 56.0 % with 17, in turns
in one process.

The trainer compares micro-batch sizes with it, the planner the efficiency of a layout's products. Which tiles the
library takes is not known: the trainer assumes the best of TILES, the planner the smallest (see timing/gemm.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from lakh.spec.model import Model

__all__ = ["block_efficiency", "fullest_micro_batch", "num_waves", "wave_efficiency"]

TILES = ((256, 128), (128, 256), (192, 192))
"""Tiles of the library's kernels for an H100 or H200 (from a profile of a step)."""


def num_waves(
    rows: Any, columns: Any, tile: tuple[float, float], processors: Any, ceil: Callable[[Any], Any] = math.ceil
) -> Any:
    """Waves that the tiles of a product fill, as a fraction. For numpy arrays pass `ceil=numpy.ceil`."""
    return ceil(rows / tile[0]) * ceil(columns / tile[1]) / processors


def wave_efficiency(rows: int, columns: int, processors: int) -> float:
    """Share of the multiprocessors' time that computes the product, with the best of TILES."""
    shares: list[float] = []
    for height, width in TILES:
        waves = math.ceil(num_waves(rows, columns, (height, width), processors))
        shares.append(rows * columns / (height * width * processors * waves))
    return max(shares)


def block_efficiency(model: Model, tokens: int, processors: int) -> float:
    """Wave efficiency of a block's products whose rows are tokens: forward, and backward for the inputs."""
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    forward = [(model.width, qkv), (model.heads * model.head_dim, model.width)]
    forward += [(model.width, 2 * model.ffn), (model.ffn, model.width)]
    work = [(inner * columns, columns) for inner, columns in forward] + [
        (inner * outer, inner) for inner, outer in forward
    ]
    ideal = sum(flops for flops, _ in work)
    return ideal / sum(flops / wave_efficiency(tokens, columns, processors) for flops, columns in work)


def fullest_micro_batch(model: Model, sequence: int, sizes: Iterable[int], processors: int) -> int:
    """The micro-batch size with the highest block efficiency; of equal ones the smallest."""
    return max(sorted(sizes), key=lambda size: block_efficiency(model, size * sequence, processors))
