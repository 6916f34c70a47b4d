"""What a step does: how its tokens are shared among rows, and which row gives way when blocks run out.

Pure functions over numbers. Rows that draw go first, one token and their guesses each, so that a long prompt never
stops them; what is left of the budget goes to prompts in the order of their arrival, in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Share", "burst_steps", "share_budget"]

BURSTS = ((32, 8), (9, 4), (2, 2), (1, 8))  # from so many rows on, so many greedy steps without a look


class Share(NamedTuple):
    counts: list[int]
    """Tokens of each row in this step; 0 waits for the next one."""
    reason: str


def burst_steps(num_rows: int) -> int:
    """Greedy steps that a GPU takes before their tokens are read. Who comes meanwhile waits for the end of it, so where
    few rows share a step they are few; the host's work between two bursts grows with the rows, so where many do it is
    done more seldom (64 rows, 1.2B parameters, H200: 1.1 ms, where a step takes 2.3). A row alone has no one beside it
    that a newcomer would find at work: it goes as far as a graph remembers.
    """
    return next(steps for rows, steps in BURSTS if num_rows >= rows)


def share_budget(pending: Sequence[int], budget: int) -> Share:
    """`pending`: tokens that each running row has still to compute, in the order of arrival. At least one gets work."""
    counts = [int(count == 1) for count in pending]
    left = max(budget - sum(counts), 0 if any(counts) else 1)
    num_prompts = 0
    for index, count in enumerate(pending):
        if count > 1 and left > 0:
            counts[index] = min(count, left)
            left -= counts[index]
            num_prompts += 1
    cut = sum(count > given > 0 for count, given in zip(pending, counts, strict=True))
    waits = sum(given == 0 for given in counts)
    draws = sum(count == 1 for count in pending)
    return Share(counts, f"{draws} rows draw, {num_prompts} prompts advance ({cut} in part), {waits} wait")
