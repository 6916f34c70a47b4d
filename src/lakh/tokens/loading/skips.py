"""Sequences that training skips: position in the stream -> global sequence index.

Position k is the k-th index outside of all ranges. A range ahead of the current position does not change the past,
so that a run can continue without a batch that caused a loss spike.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["SkipRanges"]


class SkipRanges:
    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        merged: list[list[int]] = []
        for first, end in sorted(ranges):
            if merged and first <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([first, end])
        self.ranges = tuple((first, end) for first, end in merged)

    def index_of(self, position: int) -> int:
        for first, end in self.ranges:
            if position < first:
                break
            position += end - first
        return position

    def with_positions(self, first: int, end: int) -> SkipRanges:
        """Also skip the sequences at positions first .. end - 1."""
        indexes = [self.index_of(position) for position in range(first, end)]
        return SkipRanges([*self.ranges, *((index, index + 1) for index in indexes)])
