"""The lookups of a step by row, on an NVIDIA GPU and without a wait for it.

    lookup_keys   the row of each lookup, and the slot of its bag in the gradient
    (sort)        one stable sort of the rows of all tables
    mark_runs     where a run of equal rows starts; the slots in sorted order
    (scan)        the number of each lookup's run
    list_runs     where each run starts

The host does not know how many runs there are; it launches for the largest number, and the kernels read the number.

Legend: N lookups, B samples, C columns of a sample, F features that look up the tables. A slot is a place in the
gradient, B x C, in units of UNIT values. triton_lookup.py describes the places of features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lakh.workloads.dlrm.embedding.jagged import JaggedBags

__all__ = ["UNIT", "SortedLookups", "sort_lookups"]

BLOCK = 1024  # lookups of a program
LOG2_BAGS = 7  # bags of a program of lookup_keys
UNIT = 4  # widths are multiples of it


@dataclass(frozen=True, eq=False)
class SortedLookups:
    rows: Tensor
    """N, ascending."""
    slots: Tensor
    """N: where the gradient of each lookup is."""
    runs: Tensor
    """N: the number of the lookup's run, from 1. The last is the number of runs."""
    starts: Tensor
    """The position of the first lookup of each run, and N."""

    def __len__(self) -> int:
        return len(self.rows)


@triton.jit(do_not_specialize=["batch", "first_slot"])
def _lookup_keys(ids, offsets, places, positions, rows, slots, batch, columns, first_slot, UNIT_: tl.constexpr,
                 LOG2_BAGS_: tl.constexpr, BLOCK_: tl.constexpr):  # fmt: skip
    """A program takes some bags of one feature. `positions`: where the lookups of a feature are in `rows`."""
    feature = tl.program_id(1)
    first_row, column = tl.load(places + feature * 4), tl.load(places + feature * 4 + 3)
    feature_bag = tl.load(places + feature * 4 + 2).to(tl.int32) * batch
    first_bag = feature_bag + tl.program_id(0) * (1 << LOG2_BAGS_)
    end_bag = tl.minimum(first_bag + (1 << LOG2_BAGS_), feature_bag + batch)
    start, end = tl.load(offsets + first_bag), tl.load(offsets + end_bag)
    to = tl.load(positions + feature) - tl.load(offsets + feature_bag)
    for position in range(start, end, BLOCK_):
        at = position + tl.arange(0, BLOCK_)
        inside = at < end
        bag = tl.zeros([BLOCK_], tl.int32) + first_bag  # the last bag that starts at `at` or before
        for bit in tl.static_range(LOG2_BAGS_):
            later = bag + (1 << (LOG2_BAGS_ - 1 - bit))
            known = inside & (later < end_bag)
            bag = tl.where(known & (tl.load(offsets + later, mask=known, other=0) <= at), later, bag)
        row = tl.load(ids + at, mask=inside, other=0) + first_row
        tl.store(rows + to + at, row.to(rows.dtype.element_ty), mask=inside)
        slot = first_slot + (bag - feature_bag) * (columns // UNIT_) + column.to(tl.int32) // UNIT_
        tl.store(slots + to + at, slot, mask=inside)


@triton.jit(do_not_specialize=["lookups"])
def _mark_runs(rows, order, slots, sorted_slots, is_first, lookups, BLOCK_: tl.constexpr):
    at = tl.program_id(0) * BLOCK_ + tl.arange(0, BLOCK_)
    inside = at < lookups
    row = tl.load(rows + at, mask=inside, other=0)
    before = tl.load(rows + at - 1, mask=inside & (at > 0), other=-1)
    tl.store(is_first + at, (row != before).to(tl.int32), mask=inside)
    slot = tl.load(slots + tl.load(order + at, mask=inside, other=0), mask=inside, other=0)
    tl.store(sorted_slots + at, slot, mask=inside)


@triton.jit(do_not_specialize=["lookups"])
def _list_runs(runs, starts, lookups, BLOCK_: tl.constexpr):
    at = tl.program_id(0) * BLOCK_ + tl.arange(0, BLOCK_)
    inside = at < lookups
    run = tl.load(runs + at, mask=inside, other=0)
    before = tl.load(runs + at - 1, mask=inside & (at > 0), other=0)
    tl.store(starts + run - 1, at, mask=inside & (run != before))
    tl.store(starts + run, at + 1, mask=at == lookups - 1)


def sort_lookups(
    passes: Sequence[JaggedBags], features: Sequence[int], places_F4: Tensor, columns: int, num_rows: int
) -> SortedLookups:
    """The lookups of these features in several passes; the slots of a pass follow those of the one before."""
    counts = [bags.count_ids(features) for bags in passes]
    count, device = sum(counts), places_F4.device
    rows = torch.empty(count, dtype=torch.int32 if num_rows < 2**31 else torch.int64, device=device)
    slots, runs = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    starts = torch.empty(count + 1, dtype=torch.int32, device=device)
    position = slot = 0
    for bags, size in zip(passes, counts, strict=True):
        end = position + size
        if size:
            first_bags = places_F4[:, 2] * bags.batch
            sizes_F = bags.offsets[first_bags + bags.batch] - bags.offsets[first_bags]
            grid = triton.cdiv(bags.batch, 1 << LOG2_BAGS), len(places_F4)
            _lookup_keys[grid](
                bags.ids, bags.offsets, places_F4, sizes_F.cumsum(0) - sizes_F, rows[position:end],
                slots[position:end], bags.batch, columns, slot, UNIT_=UNIT, LOG2_BAGS_=LOG2_BAGS, BLOCK_=BLOCK,
            )  # fmt: skip
        position, slot = end, slot + bags.batch * columns // UNIT
    if count:
        rows, order = torch.sort(rows, stable=True)
        sorted_slots, blocks = torch.empty_like(slots), (triton.cdiv(count, BLOCK),)
        _mark_runs[blocks](rows, order, slots, sorted_slots, runs, count, BLOCK_=BLOCK)
        slots, runs = sorted_slots, torch.cumsum(runs, 0, dtype=torch.int32)
        _list_runs[blocks](runs, starts, count, BLOCK_=BLOCK)
    return SortedLookups(rows, slots, runs, starts)
