"""What a step does: how its tokens are shared among rows, and which row gives way when blocks run out.

Pure functions over numbers. Rows that draw go first, one token and their guesses each, so that a long prompt never
stops them; what is left of the budget goes to prompts in the order of their arrival, in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Share", "burst_steps", "share_budget"]

BURSTS = ((32, 8), (9, 4), (2, 2), (1, 8))  # from so many rows on, so many greedy steps without a look
NEEDED = 0.7  # of the tokens that a burst draws


class Share(NamedTuple):
    counts: list[int]
    """Tokens of each row in this step; 0 waits for the next one."""
    reason: str


def burst_steps(left: Sequence[int]) -> int:
    """Greedy steps that a GPU takes before their tokens are read; `left`: tokens that each row may still draw.

    Who comes meanwhile waits for the end of it, so where few rows share a step they are few; the host's work between
    two bursts grows with the rows, so where many do it is done more seldom (64 rows, 1.2B parameters, H200: 1.1 ms,
    where a step takes 2.3). A row alone has no one beside it that a newcomer would find at work: it goes as far as a
    graph remembers. Rows that reach their end on the way cost nothing while others go on, but are answered late, and
    the fewer still draw the less a step gives: a burst in which less than NEEDED of the tokens are wanted is halved.
    """
    steps = min(next(steps for rows, steps in BURSTS if len(left) >= rows), max(left))
    while steps > 1 and sum(min(count, steps) for count in left) < NEEDED * steps * len(left):
        steps //= 2
    return steps


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
