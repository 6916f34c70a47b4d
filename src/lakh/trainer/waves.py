"""How full a micro-batch keeps a GPU's multiprocessors: products are cut into tiles, and tiles are worked on in waves.

A product of M rows and N columns has a few thousand tiles; as many as there are multiprocessors are computed at a time,
and in the last wave some stand idle. With 2,048 columns and 132 multiprocessors, 8 or 16 sequences of 4,096 tokens fill
15.5 or 31.03 waves and wait for 16 or 32; 17 fill 32.97 of 33. StepMetrics on an H200 with 1.245 billion parameters
(2026-11-15): 55.0 % MFU with 8, 56.0 % with 17, in turns in one process.

Pure arithmetic. What it does not know: which tiles the library takes (it is taken to choose the best of TILES), and
memory; micro_batch.py tries what fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from lakh.spec import Model

__all__ = ["fullest", "fullness", "wave_share"]

TILES = ((256, 128), (128, 256), (192, 192))
"""What the library's kernels for an H100 or H200 compute at a time (from a profile of a step)."""


def wave_share(rows: int, columns: int, processors: int) -> float:
    """Share of the multiprocessors' time that goes into the product, with the best of TILES."""
    return max(_share(rows, columns, height, width, processors) for height, width in TILES)


def _share(rows: int, columns: int, height: int, width: int, processors: int) -> float:
    tiles = math.ceil(rows / height) * math.ceil(columns / width)
    waves = math.ceil(tiles / processors)
    return rows * columns / (height * width * processors * waves)


def fullness(model: Model, tokens: int, processors: int) -> float:
    """Of the products of a block whose rows are tokens: forward, and backward for the inputs."""
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    forward = [(model.width, qkv), (model.heads * model.head_dim, model.width)]
    forward += [(model.width, 2 * model.ffn), (model.ffn, model.width)]
    work = [(inner * columns, columns) for inner, columns in forward] + [
        (inner * outer, inner) for inner, outer in forward
    ]
    ideal = sum(flops for flops, _ in work)
    return ideal / sum(flops / wave_share(tokens, columns, processors) for flops, columns in work)


def fullest(model: Model, sequence: int, sizes: Iterable[int], processors: int) -> int:
    """The micro-batch of these whose products leave the least idle; of equals, the smallest."""
    return max(sorted(sizes), key=lambda size: fullness(model, size * sequence, processors))
