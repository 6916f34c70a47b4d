"""Loops of the exchange of ids and columns, compiled by numba.

Legend: F features, B samples of a rank, P features of parts, C columns of a sample.
"""

from __future__ import annotations

import numpy as np

from lakh.compiled import compiled

__all__ = ["add_columns", "merge_ids", "pack_ids", "take_columns"]


@compiled
def pack_ids(ids, offsets, batch, lookups_P3, rows_F, out_ids, out_lengths):
    """The ids of each part, one after the other, relative to its first row. Returns (number of ids, -1), or the bag of
    an id that is out of range and its position."""
    written = 0
    for p in range(len(lookups_P3)):
        feature, first, end = lookups_P3[p, 0], lookups_P3[p, 1], lookups_P3[p, 2]
        rows = rows_F[feature]
        for b in range(batch):
            bag = feature * batch + b
            before = written
            for position in range(offsets[bag], offsets[bag + 1]):
                row = ids[position]
                if row < 0 or row >= rows:
                    return bag, position
                if first <= row and row < end:
                    out_ids[written] = row - first
                    written += 1
            out_lengths[p * batch + b] = written - before
    return written, -1


@compiled
def merge_ids(ids, lengths, sources, parts, batch, out_ids, out_offsets):
    """From the order of arrival (source, part, sample) to bags of (part, source, sample)."""
    starts = np.zeros(sources * parts, np.int64)  # in `ids`, of each source and part
    total = 0
    for i in range(sources * parts):
        starts[i] = total
        for b in range(batch):
            total += lengths[i * batch + b]
    written = bag = 0
    out_offsets[0] = 0
    for p in range(parts):
        for s in range(sources):
            at = starts[s * parts + p]
            for b in range(batch):
                for _ in range(lengths[(s * parts + p) * batch + b]):
                    out_ids[written] = ids[at]
                    written += 1
                    at += 1
                bag += 1
                out_offsets[bag] = written


@compiled
def add_columns(values_BC, moves_P4, out_BC):
    """Put the columns of a rank's parts into the columns of the samples."""
    for b in range(len(values_BC)):
        for p in range(len(moves_P4)):
            own, target, width = moves_P4[p, 0], moves_P4[p, 1], moves_P4[p, 2]
            source_W, out_W = values_BC[b, own : own + width], out_BC[b, target : target + width]
            if moves_P4[p, 3]:
                for w in range(width):
                    out_W[w] += source_W[w]
            else:
                for w in range(width):
                    out_W[w] = source_W[w]


@compiled
def take_columns(values_BC, moves_P4, out_BC):
    """The columns of a rank's parts, from the columns of the samples."""
    for b in range(len(values_BC)):
        for p in range(len(moves_P4)):
            own, target, width = moves_P4[p, 0], moves_P4[p, 1], moves_P4[p, 2]
            source_W, out_W = values_BC[b, target : target + width], out_BC[b, own : own + width]
            for w in range(width):
                out_W[w] = source_W[w]
