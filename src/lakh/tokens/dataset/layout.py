"""Sequence layouts: which tokens of a token set form sequence i, before shuffling.

A sequence has room for `capacity` tokens and is a list of spans; a span is a run of tokens of one document.

    ConcatLayout     documents are concatenated and split every `capacity` tokens; neighbours share one token, so that
                     each token (except a shard's first, and a remainder at its end) is predicted once. No table.
    BestFitLayout    whole documents, longest first, each into the sequence with the least remaining room. Longer
                     documents are split into full sequences (sharing one token) and a remainder. No token is dropped;
                     free room is padding. Documents are packed BLOCK at a time, which bounds the memory in use.

BestFitLayout keeps 12 bytes per span: 1.2 GB for 100 million documents in each reading process. Both depend only on the
token set and the capacity. No span crosses a shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lakh.tokens.dataset.token_set import TokenSet

__all__ = ["BestFitLayout", "ConcatLayout", "SequenceLayout", "TokenSpan", "best_fit"]

BLOCK = 4096


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens start .. stop - 1 of a shard, all of one document."""

    shard: int
    start: int
    stop: int


class SequenceLayout(Protocol):
    num_sequences: int

    def spans(self, index: int) -> list[TokenSpan]: ...


class ConcatLayout:
    def __init__(self, tokens: TokenSet, capacity: int) -> None:
        if capacity < 2:
            raise ValueError(f"a sequence of {capacity} tokens predicts nothing")
        self._starts, self._stride = tokens.starts, capacity - 1
        counts = [max(0, len(shard) - 1) // self._stride for shard in tokens.tokens]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self.num_sequences = int(self._ends[-1]) if counts else 0

    def spans(self, index: int) -> list[TokenSpan]:
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"sequence {index} of {self.num_sequences}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[shard - 1]) if shard else 0
        start = (index - before) * self._stride
        stop = start + self._stride + 1
        starts = self._starts[shard]
        low, high = np.searchsorted(starts, [start + 1, stop])
        edges = [start, *(int(edge) for edge in starts[low:high]), stop]
        return [TokenSpan(shard, a, b) for a, b in itertools.pairwise(edges)]


class BestFitLayout:
    def __init__(self, tokens: TokenSet, capacity: int) -> None:
        if capacity < 2:
            raise ValueError(f"a sequence of {capacity} tokens predicts nothing")
        self._bases = np.cumsum([0, *(len(shard) for shard in tokens.tokens)], dtype=np.int64)
        offsets, lengths, firsts = [], [], [np.zeros(1, np.int64)]
        sequences = spans = 0
        for shard, starts in enumerate(tokens.starts):
            edges = np.append(starts.astype(np.int64), len(tokens.tokens[shard]))
            for begin in range(0, len(starts), BLOCK):
                first, length = _split(edges[begin : begin + BLOCK + 1], capacity)
                sequence_of = best_fit(length, capacity)
                order = np.argsort(sequence_of, kind="stable")
                offsets.append(first[order] + self._bases[shard])
                lengths.append(length[order].astype(np.int32))
                firsts.append(spans + np.cumsum(np.bincount(sequence_of), dtype=np.int64))
                sequences, spans = sequences + int(sequence_of.max()) + 1, spans + len(order)
        self.num_sequences = sequences
        self._offsets = np.concatenate(offsets) if offsets else np.empty(0, np.int64)
        self._lengths = np.concatenate(lengths) if lengths else np.empty(0, np.int32)
        self._firsts = np.concatenate(firsts)

    def spans(self, index: int) -> list[TokenSpan]:
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"sequence {index} of {self.num_sequences}")
        where = slice(self._firsts[index], self._firsts[index + 1])
        result = []
        for offset, length in zip(self._offsets[where].tolist(), self._lengths[where].tolist(), strict=True):
            shard = int(np.searchsorted(self._bases, offset, side="right")) - 1
            start = offset - int(self._bases[shard])
            result.append(TokenSpan(shard, start, start + length))
        return result


def _split(edges: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(start, length) of the spans of the documents between these edges: full sequences, then a remainder."""
    begins, sizes = edges[:-1], np.diff(edges)
    counts = np.maximum(1, -(-(sizes - 1) // (capacity - 1)))
    document = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * (capacity - 1)
    return begins[document] + start, np.minimum(capacity, sizes[document] - start)


def best_fit(lengths: Sequence[int] | np.ndarray, capacity: int) -> np.ndarray:
    """The sequence of each span: longest span first, into the fullest sequence with enough room, else into a new one.

    Equal spans keep their order; of equally full sequences the most recently filled one is used.
    """
    lengths = np.asarray(lengths, np.int64)
    sequence_of = np.empty(len(lengths), np.int64)
    sequences_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # free tokens -> sequences
    has = 0  # bit n is set if sequences_with[n] is not empty
    count = 0
    for span in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[span])
        fitting = has >> size
        if fitting:
            free = size + (fitting & -fitting).bit_length() - 1
            sequence = sequences_with[free].pop()
            if not sequences_with[free]:
                has ^= 1 << free
        else:
            sequence, free, count = count, capacity, count + 1
        sequence_of[span] = sequence
        left = free - size
        if left:
            sequences_with[left].append(sequence)
            has |= 1 << left
    return sequence_of
