"""Does a step stand out from those before it? Pure decisions over the last losses and gradient norms.

What is usual is told by medians, which a single bad step does not move: the level by that of the last few losses, its
variation by that of the changes from step to step, so that a steep fall is not taken for noise. With fewer than
MIN_HISTORY steps nothing stands out: the beginning of a run is steep.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["HISTORY", "Verdict", "judge_loss", "norm_limit"]

HISTORY = 64
MIN_HISTORY = 16
LEVEL = 9  # steps that tell where the loss is now: few, because it falls
LEAST_SPREAD = 0.02  # of the median: in a very smooth stretch, two percent are not a jump yet


@dataclass(frozen=True)
class Verdict:
    is_spike: bool
    reason: str


def judge_loss(loss: float, before: Sequence[float], factor: float) -> Verdict:
    """Whether the loss of a step is above the usual by `factor` times what it usually varies by."""
    if not math.isfinite(loss):
        return Verdict(True, f"the loss is {loss}")
    recent = [value for value in before[-HISTORY:] if math.isfinite(value)]
    if len(recent) < MIN_HISTORY:
        return Verdict(False, f"only {len(recent)} steps to compare with")
    usual = statistics.median(recent[-LEVEL:])
    changes = [abs(after - before) for before, after in itertools.pairwise(recent)]
    spread = max(1.4826 * statistics.median(changes), LEAST_SPREAD * abs(usual))
    limit = usual + factor * spread
    words = f"the loss {loss:.4f} is {'above' if loss > limit else 'within'} {usual:.4f} + {factor:g} x {spread:.4f}"
    return Verdict(loss > limit, f"{words} of the last {len(recent)} steps")


def norm_limit(before: Sequence[float], factor: float) -> float:
    """The gradient norm above which an update is left out."""
    recent = [value for value in before[-HISTORY:] if math.isfinite(value)]
    return factor * statistics.median(recent) if len(recent) >= MIN_HISTORY else math.inf
