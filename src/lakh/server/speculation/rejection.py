"""Rejection sampling: accept draft tokens so that the output keeps the target model's distribution exactly.

A draft token g sampled from q is accepted with probability min(1, p[g] / q[g]). The first rejected one is replaced by a
sample from max(p - q, 0), and the draft tokens after it are dropped. The result is distributed as if every token had
been sampled from p, whatever q is; the acceptance rate is 1 minus the total variation distance of p and q.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["DraftTokens", "rejection_sample", "sample_index"]


class DraftTokens(NamedTuple):
    """Tokens proposed for one sequence."""

    tokens: list[int]
    probabilities: list[Tensor]
    """The draft model's distribution at each token, if rejection sampling verifies them; else empty."""


def rejection_sample(draft: DraftTokens, p: Sequence[Tensor], uniform: Callable[[], float]) -> list[int]:
    """The accepted draft tokens and one more token.

    `p`: the target model's distribution at each draft token and after the last one. `uniform` returns numbers in [0,
    1).
    """
    for index, (token, q) in enumerate(zip(draft.tokens, draft.probabilities, strict=True)):
        if uniform() * float(q[token]) < float(p[index][token]):
            continue
        residual = (p[index] - q).clamp_min(0)
        # A zero residual means that p and q are equal up to rounding: sample from p.
        return [*draft.tokens[:index], sample_index(residual if float(residual.sum()) > 0 else p[index], uniform())]
    return [*draft.tokens, sample_index(p[len(draft.tokens)], uniform())]


def sample_index(weights: Tensor, number: float) -> int:
    """An index with probability proportional to its weight."""
    cumulative = weights.cumsum(dim=-1)
    index = int((cumulative <= number * cumulative[-1]).sum())
    return min(index, int(weights.nonzero()[-1]))
