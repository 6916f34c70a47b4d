"""Speculation: guess the next tokens cheaply, let the model score them all in one step, keep what it would have drawn.

The model draws its own token at every place, from its own scores and the row's own random number; a guess is kept
while it equals what was drawn. So the answer is the same, token for token, with speculation and without, greedy or
sampled. Only where a draft model guesses for a row that samples without a seed, to which no particular answer was
promised, rejection sampling (rejection.py) takes its place: it keeps more guesses, and the answer's distribution is
the same.

    Lookup      guesses that the text goes on as it did after the last place where its end stood before; costs nothing
    Drafter     a small model guesses (draft.py)
    decide      how many guesses pay, from the measured cost of steps and of guessing, and the share of kept guesses

Draft-token acceptance (guesses kept by the model) is counted here; whether users accept a suggestion is another figure
under another name (metrics.py).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["MAX_GUESSES", "Costs", "Decision", "Lookup", "Record", "decide", "expected_tokens"]

MAX_GUESSES = 7
SMOOTHING = 0.1  # weight of the newest figure
FASTER, SLOWER = 0.5, 0.02  # weight of a step's time that is below, or above, what was known
FIRST_ACCEPTANCE = 0.5
WIDTH = array("i").itemsize
RETRY_EVERY = 64  # steps without a guess of any row, after which one tries once more


class Lookup:
    """Prompt lookup: what followed the last occurrence of the last `longest` .. `shortest` tokens.

    Tokens are kept as bytes, so that a search is one of memory: microseconds for thousands of tokens, and nothing to
    build when a prompt comes.
    """

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._bytes = bytearray()

    def guess(self, ids: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens. `ids` only ever grows between calls."""
        end = len(ids)
        self._bytes += array("i", ids[len(self._bytes) // WIDTH :]).tobytes()
        for size in self._sizes:
            if end > size:
                place = self._find(self._bytes[(end - size) * WIDTH :], (end - 1) * WIDTH)
                if place is not None:
                    return _continued(ids, place + size, most)
        return []

    def _find(self, wanted: bytes | bytearray, before: int) -> int | None:
        """The token where these bytes last begin, wholly before this place; None where they do not."""
        at = self._bytes.rfind(wanted, 0, before)
        while at >= 0 and at % WIDTH:  # inside a token: not a place
            at = self._bytes.rfind(wanted, 0, at + len(wanted) - 1)
        return at // WIDTH if at >= 0 else None


def _continued(ids: Sequence[int], place: int, most: int) -> list[int]:
    """ids[place:], which goes on with its own guesses where it reaches the end: a loop is guessed as a loop."""
    guesses: list[int] = []
    for offset in range(most):
        at = place + offset
        guesses.append(ids[at] if at < len(ids) else guesses[at - len(ids)])
    return guesses


class Decision(NamedTuple):
    num_guesses: int
    reason: str
    gain: float = 1.0
    """Tokens a second, to those without guesses."""


@dataclass
class Costs:
    """Seconds of an undisturbed step by its number of tokens; what was not measured lies between its neighbours."""

    by_tokens: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sizes = sorted(self.by_tokens)

    def record(self, num_tokens: int, seconds: float) -> None:
        known = self.by_tokens.get(num_tokens)
        if known is None:
            insort(self._sizes, num_tokens)
            self.by_tokens[num_tokens] = seconds
            return
        # A step is never faster than it can be, but often slower: other work on the machine says nothing of its cost.
        weight = FASTER if seconds < known else SLOWER
        self.by_tokens[num_tokens] = known + weight * (seconds - known)

    def of(self, num_tokens: int) -> float | None:
        """None while it must be tried: larger than everything measured."""
        if num_tokens in self.by_tokens:
            return self.by_tokens[num_tokens]
        place = bisect_left(self._sizes, num_tokens)
        if place == len(self._sizes):
            return None
        if place == 0:
            return self.by_tokens[self._sizes[0]]
        low, high = self._sizes[place - 1], self._sizes[place]
        share = (num_tokens - low) / (high - low)
        return self.by_tokens[low] + share * (self.by_tokens[high] - self.by_tokens[low])


@dataclass
class Record:
    """How a row's guesses fared."""

    acceptance: float = FIRST_ACCEPTANCE
    """Probability that a guess is kept, given that those before it were."""
    drafted: int = 0
    kept: int = 0
    steps_since_guess: int = 0

    def add(self, drafted: int, kept: int) -> None:
        self.drafted += drafted
        self.kept += kept
        tried = min(kept + 1, drafted)  # guesses after the first wrong one say nothing
        for index in range(tried):
            self.acceptance += SMOOTHING * ((index < kept) - self.acceptance)


def expected_tokens(acceptance: float, num_guesses: int) -> float:
    """Tokens of one step: 1 + a + a^2 + ... + a^k."""
    if acceptance >= 1.0:
        return num_guesses + 1.0
    return (1 - acceptance ** (num_guesses + 1)) / (1 - acceptance)


def decide(
    *, acceptance: float, num_rows: int, costs: Costs, guess_s: float = 0.0, most: int = MAX_GUESSES
) -> Decision:
    """How many guesses for each of `num_rows` rows give most tokens per second; 0 where none pay.

    `guess_s`: what one more guess for all rows costs before the step; nothing where it is looked up.
    """
    alone = costs.of(num_rows)
    if alone is None:
        return Decision(0, "the cost of a plain step is not known yet")
    best, best_rate = 0, 1 / alone
    for num_guesses in range(1, most + 1):
        cost = costs.of(num_rows * (num_guesses + 1))
        if cost is None:
            return Decision(num_guesses, f"a step of {num_rows * (num_guesses + 1)} tokens was never measured")
        rate = expected_tokens(acceptance, num_guesses) / (cost + num_guesses * guess_s)
        if rate > best_rate:
            best, best_rate = num_guesses, rate
    gain = best_rate * alone
    if best == 0:
        return Decision(0, f"at acceptance {acceptance:.2f} no number of guesses pays for {num_rows} rows")
    return Decision(best, f"{gain:.2f}x at acceptance {acceptance:.2f} for {num_rows} rows", gain)
