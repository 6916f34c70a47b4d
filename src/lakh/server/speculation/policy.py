"""How many draft tokens pay off, from the measured cost of steps and drafts and the measured acceptance rate.

This is the draft-token acceptance of the model; whether users accept suggestions is another metric (metrics.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["MAX_DRAFT_TOKENS", "AcceptanceRate", "DraftLength", "StepCosts", "choose_draft_length", "expected_tokens"]

MAX_DRAFT_TOKENS = 7
SMOOTHING = 0.1  # weight of the newest observation
FASTER, SLOWER = 0.5, 0.02  # weight of a step time below, or above, the known one
INITIAL_ACCEPTANCE = 0.5


class DraftLength(NamedTuple):
    num_tokens: int
    reason: str
    speedup: float = 1.0
    """Expected tokens per second relative to no draft tokens."""


@dataclass
class StepCosts:
    """Seconds of an undisturbed step by its number of tokens, interpolated between measured sizes."""

    by_tokens: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sizes = sorted(self.by_tokens)
        self._interpolated: dict[int, float | None] = {}  # since the last record

    def record(self, num_tokens: int, seconds: float) -> None:
        known = self.by_tokens.get(num_tokens)
        self._interpolated.clear()
        if known is None:
            insort(self._sizes, num_tokens)
            self.by_tokens[num_tokens] = seconds
            return
        # Other load on the machine makes a step slower, never faster: slow steps weigh little.
        weight = FASTER if seconds < known else SLOWER
        self.by_tokens[num_tokens] = known + weight * (seconds - known)

    def of(self, num_tokens: int) -> float | None:
        """None if the size is larger than every measured one and has to be tried."""
        if num_tokens in self.by_tokens:
            return self.by_tokens[num_tokens]
        if num_tokens not in self._interpolated:
            self._interpolated[num_tokens] = self._interpolate(num_tokens)
        return self._interpolated[num_tokens]

    def _interpolate(self, num_tokens: int) -> float | None:
        index = bisect_left(self._sizes, num_tokens)
        if index == len(self._sizes):
            return None
        if index == 0:
            return self.by_tokens[self._sizes[0]]
        low, high = self._sizes[index - 1], self._sizes[index]
        share = (num_tokens - low) / (high - low)
        return self.by_tokens[low] + share * (self.by_tokens[high] - self.by_tokens[low])


@dataclass
class AcceptanceRate:
    """A smoothed acceptance rate of draft tokens."""

    acceptance: float = INITIAL_ACCEPTANCE
    """Probability that a draft token is accepted, given that those before it were."""
    num_drafted: int = 0
    num_accepted: int = 0
    steps_since_draft: int = 0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        num_verified = min(num_accepted + 1, num_drafted)  # tokens after the first rejected one carry no information
        for index in range(num_verified):
            self.acceptance += SMOOTHING * ((index < num_accepted) - self.acceptance)


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Tokens of one step: 1 + a + a^2 + ... + a^k."""
    if acceptance >= 1.0:
        return num_draft_tokens + 1.0
    return (1 - acceptance ** (num_draft_tokens + 1)) / (1 - acceptance)


def choose_draft_length(
    *, acceptance: float, num_seqs: int, costs: StepCosts, draft_s: float = 0.0, max_tokens: int = MAX_DRAFT_TOKENS
) -> DraftLength:
    """The draft length that gives each of `num_seqs` sequences most tokens per second; 0 if none pays off.

    `draft_s`: seconds to draft one more token for all sequences; 0 for prompt lookup.
    """
    baseline_s = costs.of(num_seqs)
    if baseline_s is None:
        return DraftLength(0, "the cost of a step without draft tokens is not measured yet")
    best, best_rate = 0, 1 / baseline_s
    expected = accepted = 1.0  # as `expected_tokens` has it, term by term
    for num_tokens in range(1, max_tokens + 1):
        step_s = costs.of(num_seqs * (num_tokens + 1))
        if step_s is None:
            return DraftLength(num_tokens, f"a step of {num_seqs * (num_tokens + 1)} tokens is not measured yet")
        accepted *= acceptance
        expected += accepted
        rate = expected / (step_s + num_tokens * draft_s)
        if rate > best_rate:
            best, best_rate = num_tokens, rate
    speedup = best_rate * baseline_s
    if best == 0:
        return DraftLength(0, f"at acceptance {acceptance:.2f} no draft length pays off for {num_seqs} sequences")
    return DraftLength(best, f"{speedup:.2f}x at acceptance {acceptance:.2f} for {num_seqs} sequences", speedup)
