"""Sequences that training passes over: position in the stream -> global sequence index.

Position k shows the k-th index that no range covers. A range added ahead of where a run stands leaves everything
before it as it was, which is what lets a run go on past a batch that spoilt it.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Skips"]


class Skips:
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

    def with_positions(self, first: int, end: int) -> Skips:
        """Also pass over what positions first .. end - 1 show."""
        indexes = [self.index_of(position) for position in range(first, end)]
        return Skips([*self.ranges, *((index, index + 1) for index in indexes)])
