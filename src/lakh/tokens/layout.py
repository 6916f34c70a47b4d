"""How documents become rows: which tokens row i of a token set holds, before anything is shuffled.

A row has room for `capacity` tokens and is a list of pieces; a piece is a run of tokens of one document.

    Concat    documents lie end to end and are cut every `capacity` tokens; neighbours share one token, so that each
              token (but a shard's first, and fewer than a row at its end) is predicted exactly once. No table.
    BestFit   whole documents, the longest first, each into the row where it leaves the least room. Documents longer
              than a row are cut into full rows (sharing one token) and a rest, which is fitted like a document. No
              token is dropped; what stays free in a row is padding. Documents are packed BLOCK at a time, so that a
              row holds neighbours of the packed order and memory at work does not grow with the set.

BestFit keeps a table of 12 bytes a piece: a set of 100 million documents takes 1.2 GB in each reading process.
Both are functions of the token set and the capacity alone. No piece crosses a shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lakh.tokens.token_set import TokenSet

__all__ = ["BestFit", "Concat", "Layout", "Piece", "fit"]

BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens start .. stop - 1 of a shard, all of one document."""

    shard: int
    start: int
    stop: int


class Layout(Protocol):
    num_rows: int

    def row(self, index: int) -> list[Piece]: ...


class Concat:
    def __init__(self, tokens: TokenSet, capacity: int) -> None:
        if capacity < 2:
            raise ValueError(f"a row of {capacity} tokens predicts nothing")
        self._starts, self._stride = tokens.starts, capacity - 1
        counts = [max(0, len(shard) - 1) // self._stride for shard in tokens.tokens]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self.num_rows = int(self._ends[-1]) if counts else 0

    def row(self, index: int) -> list[Piece]:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[shard - 1]) if shard else 0
        start = (index - before) * self._stride
        stop = start + self._stride + 1
        starts = self._starts[shard]
        low, high = np.searchsorted(starts, [start + 1, stop])
        edges = [start, *(int(edge) for edge in starts[low:high]), stop]
        return [Piece(shard, a, b) for a, b in itertools.pairwise(edges)]


class BestFit:
    def __init__(self, tokens: TokenSet, capacity: int) -> None:
        if capacity < 2:
            raise ValueError(f"a row of {capacity} tokens predicts nothing")
        self._bases = np.cumsum([0, *(len(shard) for shard in tokens.tokens)], dtype=np.int64)
        places, lengths, firsts = [], [], [np.zeros(1, np.int64)]
        rows = pieces = 0
        for shard, starts in enumerate(tokens.starts):
            edges = np.append(starts.astype(np.int64), len(tokens.tokens[shard]))
            for begin in range(0, len(starts), BLOCK):
                first, length = _cut(edges[begin : begin + BLOCK + 1], capacity)
                row_of = fit(length, capacity)
                order = np.argsort(row_of, kind="stable")
                places.append(first[order] + self._bases[shard])
                lengths.append(length[order].astype(np.int32))
                firsts.append(pieces + np.cumsum(np.bincount(row_of), dtype=np.int64))
                rows, pieces = rows + int(row_of.max()) + 1, pieces + len(order)
        self.num_rows = rows
        self._places = np.concatenate(places) if places else np.empty(0, np.int64)
        self._lengths = np.concatenate(lengths) if lengths else np.empty(0, np.int32)
        self._firsts = np.concatenate(firsts)

    def row(self, index: int) -> list[Piece]:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        where = slice(self._firsts[index], self._firsts[index + 1])
        result = []
        for place, length in zip(self._places[where].tolist(), self._lengths[where].tolist(), strict=True):
            shard = int(np.searchsorted(self._bases, place, side="right")) - 1
            start = place - int(self._bases[shard])
            result.append(Piece(shard, start, start + length))
        return result


def _cut(edges: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(start, length) of the pieces of documents whose edges these are: full rows, then a rest."""
    begins, sizes = edges[:-1], np.diff(edges)
    counts = np.maximum(1, -(-(sizes - 1) // (capacity - 1)))
    document = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * (capacity - 1)
    return begins[document] + start, np.minimum(capacity, sizes[document] - start)


def fit(lengths: Sequence[int] | np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece: longest piece first, into the fullest row that still has room, else into a new one.

    Equal pieces keep their order, and among equally full rows the one filled last is taken.
    """
    lengths = np.asarray(lengths, np.int64)
    row_of = np.empty(len(lengths), np.int64)
    rows_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # free tokens -> rows
    has = 0  # bit n is set where rows_with[n] is not empty: the smallest fitting one is found by arithmetic
    rows = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[piece])
        fitting = has >> size
        if fitting:
            free = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[free].pop()
            if not rows_with[free]:
                has ^= 1 << free
        else:
            row, free, rows = rows, capacity, rows + 1
        row_of[piece] = row
        left = free - size
        if left:
            rows_with[left].append(row)
            has |= 1 << left
    return row_of
