"""Greedy steps of the same rows, launched ahead of what is read of them: the GPU does not wait for the host between.

The GPU reads and writes the blocks that the rows had at the start, for a row that has ended meanwhile too. A block may
be given back during a flight, but none may be taken: nobody is let in, and no row asks for more. Whatever is launched
later comes after it, on the same stream, so a flight may be left at any time with steps unread: the rows hold what was
read of it, and go on from there. Knows rows; knows nothing of what a step is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lakh.server.row import Row
from lakh.server.schedule import steps_ahead

__all__ = ["Burst", "Flight"]


class Burst(Protocol):
    """gpu/decode.py has one."""

    def launch(self, steps: int) -> None:
        """So many steps more, without waiting for them."""
        ...

    def read(self) -> list[list[int]]:
        """Wait for the oldest launch that was not read: the tokens of all rows, step by step."""
        ...


class Flight:
    def __init__(self, rows: Sequence[Row], burst: Burst, steps: int) -> None:
        """At most so many steps: the rows have room for them, each as far as it may draw."""
        self.rows = list(rows)
        self.num_read = 0
        self.spent_s = 0.0
        """Of the engine's own time; what its caller does between steps is not a step's cost."""
        self._burst, self._steps, self._launched = burst, steps, 0

    @property
    def is_over(self) -> bool:
        """Everything was read, or nobody is left to read it."""
        return self._launched == self.num_read or all(row.finish_reason is not None for row in self.rows)

    def go_on(self) -> int:
        """Launch what may be launched before the next look; how many steps that were."""
        before = self._launched
        left = [0 if row.finish_reason is not None else row.limit - len(row.tokens) for row in self.rows]
        while steps := min(steps_ahead(left, self._launched - self.num_read), self._steps - self._launched):
            self._burst.launch(steps)
            self._launched += steps
        return self._launched - before

    def look(self) -> int:
        """Wait for the oldest steps, and give every row its tokens; how many there were. Where this fails, some rows
        have theirs and others have not: the flight is then to be left.
        """
        drawn = self._burst.read()
        self.num_read += len(drawn)
        num_tokens = 0
        for row, *tokens in zip(self.rows, *drawn, strict=True):
            before = len(row.tokens)
            for token in tokens:
                row.push(token)  # says nothing once the row has ended
            row.num_computed += len(row.tokens) - before
            num_tokens += len(row.tokens) - before
        return num_tokens
