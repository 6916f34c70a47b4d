"""Steps that took far longer than the steps before them: whether a step is slow, and the reason."""

from __future__ import annotations

import math
import statistics
from collections import deque

__all__ = ["SlowStepDetector"]

HISTORY = 64
MIN_HISTORY = 8
FACTOR = 10.0  # short steps on a busy machine vary by a few times; ten times needs a cause


class SlowStepDetector:
    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=HISTORY)
        self._is_first = True

    def begin_attempt(self) -> None:
        """The next step is the first of an attempt: it compiles and fills caches, so it may be slow."""
        self._is_first = True

    def check(self, step_s: float) -> str | None:
        """The reason if this step is slow, else None."""
        if not math.isfinite(step_s) or step_s <= 0:
            return None
        is_first, self._is_first = self._is_first, False
        recent = self._recent
        if is_first:
            return None
        # A step below FACTOR times the smallest recent one is below the limit: no median needed.
        usual_s = (
            statistics.median(recent) if len(recent) >= MIN_HISTORY and step_s > FACTOR * min(recent) else math.inf
        )
        recent.append(step_s)
        if step_s <= FACTOR * usual_s:
            return None
        return f"the step took {step_s:.3g} s, {step_s / usual_s:.0f} times the usual {usual_s:.3g} s"
