"""Find a rank that is slow for many steps, from the compute times of each step. Pure; independent of torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["WINDOW_STEPS", "StragglerWatch"]

WINDOW_STEPS = 50
RATIO = 1.15
"""A rank is a straggler if it computes this much longer than the mean of the others, over the whole window."""
SHARE = 0.8
"""Of the steps of a window in which it must be the slowest: a rank that was slow once is not one."""


@dataclass
class StragglerWatch:
    """Counts over windows of WINDOW_STEPS steps."""

    _slowest: Counter[int] = field(default_factory=Counter)
    _lost_s: dict[int, float] = field(default_factory=dict)
    _others_s: float = 0.0

    def observe(self, slowest_rank: int | None, straggler_s: float, others_s: float) -> tuple[int, float] | None:
        """Add one step: `straggler_s` is how much longer the slowest rank computed than `others_s`, the mean of the
        others. At the end of a window, (rank, ratio) if one rank was slow."""
        if slowest_rank is None:
            return None
        self._slowest[slowest_rank] += 1
        self._lost_s[slowest_rank] = self._lost_s.get(slowest_rank, 0.0) + straggler_s
        self._others_s += others_s
        if self._slowest.total() < WINDOW_STEPS:
            return None
        rank, times = self._slowest.most_common(1)[0]
        ratio = 1 + self._lost_s[rank] / max(self._others_s, 1e-9)
        self._slowest, self._lost_s, self._others_s = Counter(), {}, 0.0
        return (rank, ratio) if times >= SHARE * WINDOW_STEPS and ratio >= RATIO else None
