"""Pooled lookups on an NVIDIA GPU: one launch for all tables of a width.

All tables are parts of one matrix of rows. One warp adds the rows of a bag: it reads a tile of ids, then all rows of
the tile at once, 16 bytes a thread. A program is a single warp, so that sums need no barrier.

Import only where Triton is installed; cpu_kernels.py has the plain forms.

Legend: R rows of all tables, W values of a row, B samples, C columns of a sample, F features that look up the tables.
Places have for each feature: the first row of its table, the row after its last, its number in the bags, and its first
column, which is a multiple of 4 as widths are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lakh.workloads.dlrm.embedding.jagged import JaggedBags

__all__ = ["lookup"]

TILE_VALUES = 2048  # values of a tile of rows, which a warp holds in registers


@triton.jit(do_not_specialize=["batch"])
def _lookup(weights, ids, offsets, places, out, bad_bag, batch, columns, W: tl.constexpr, BLOCK: tl.constexpr,
            TILE: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    at_w, at_l = tl.arange(0, BLOCK), tl.arange(0, TILE)
    place, sample = places + program // batch * 4, (program % batch).to(tl.int64)
    first, end_row, column = tl.load(place), tl.load(place + 1), tl.load(place + 3)
    bag = tl.load(place + 2) * batch + sample
    start, end = tl.load(offsets + bag), tl.load(offsets + bag + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for position in range(start, end, TILE):
        inside = position + at_l < end
        rows = tl.load(ids + position + at_l, mask=inside, other=0) + first
        valid = inside & (rows >= first) & (rows < end_row)
        tl.store(bad_bag + at_l * 0, bag, mask=inside & ((rows < first) | (rows >= end_row)))
        mask = valid[:, None] & (at_w < W)[None, :]
        values = tl.load(weights + rows[:, None] * W + at_w[None, :], mask=mask, other=0.0)
        total += tl.sum(values, axis=0)
    tl.store(out + sample * columns + column // 4 * 4 + at_w, total, mask=at_w < W)


def lookup(weights_RW: Tensor, bags: JaggedBags, places_F4: Tensor, bad_bag: Tensor, out_BC: Tensor) -> None:
    """Write the sums of the bags of these tables into their columns. `bad_bag`, int64, is set to the number of a bag
    with an id out of range; such an id is not looked up."""
    width, programs = weights_RW.shape[1], len(places_F4) * bags.batch
    if not programs:
        return
    block = triton.next_power_of_2(width)
    mean_length = max(1, len(bags.ids) // (len(bags.offsets) - 1))
    tile = min(triton.next_power_of_2(mean_length), max(1, TILE_VALUES // block))
    _lookup[(programs,)](weights_RW, bags.ids, bags.offsets, places_F4, out_BC, bad_bag, bags.batch, out_BC.shape[1],
                         W=width, BLOCK=block, TILE=tile, num_warps=1)  # fmt: skip
