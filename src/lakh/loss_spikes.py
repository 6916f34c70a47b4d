"""Loss and gradient spikes: whether a step stands out from the steps before it.

The trainer acts on this definition (train.on_spike) and the dashboard shows it. It is built on medians, which one bad
step does not move: the level is the median of the last few losses, the variation the median change from step to step,
so that a steep descent does not count as noise. The first MIN_HISTORY steps never count as spikes: the beginning of
a run is steep.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["HISTORY", "SpikeDecision", "SpikeDetector", "detect_loss_spike", "grad_norm_limit"]

HISTORY = 64
MIN_HISTORY = 16
LEVEL_STEPS = 9  # few, because the loss falls
MIN_SPREAD = 0.02  # of the level: in a very smooth stretch a change of two percent is not a spike
DEFAULT_FACTOR = 4.0  # the default of train.spike_factor


@dataclass(frozen=True)
class SpikeDecision:
    is_spike: bool
    reason: str


def detect_loss_spike(loss: float, history: Sequence[float], factor: float) -> SpikeDecision:
    """Whether a loss exceeds the level of the steps before it by `factor` times their usual variation."""
    if not math.isfinite(loss):
        return SpikeDecision(True, f"the loss is {loss}")
    recent = [value for value in history[-HISTORY:] if math.isfinite(value)]
    if len(recent) < MIN_HISTORY:
        return SpikeDecision(False, f"only {len(recent)} steps to compare with")
    level = statistics.median(recent[-LEVEL_STEPS:])
    changes = [abs(after - before) for before, after in itertools.pairwise(recent)]
    spread = max(1.4826 * statistics.median(changes), MIN_SPREAD * abs(level))
    limit = level + factor * spread
    side = "above" if loss > limit else "within"
    reason = f"the loss {loss:.4f} is {side} {level:.4f} + {factor:g} x {spread:.4f} of the last {len(recent)} steps"
    return SpikeDecision(loss > limit, reason)


def grad_norm_limit(history: Sequence[float], factor: float) -> float:
    """The gradient norm above which an update is skipped: `factor` times the median of the last steps."""
    recent = [value for value in history[-HISTORY:] if math.isfinite(value)]
    return factor * statistics.median(recent) if len(recent) >= MIN_HISTORY else math.inf


class SpikeDetector:
    """The same decisions for a stream of steps, fast enough to replay millions of them."""

    def __init__(self, factor: float = DEFAULT_FACTOR) -> None:
        self.factor = factor
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._norms: deque[float] = deque(maxlen=HISTORY)

    def check_loss(self, loss: float) -> str | None:
        """The reason if this loss is a spike, else None."""
        losses = self._losses
        # The limit is at least (1 + factor * MIN_SPREAD) times the smallest recent loss, which most losses are below.
        if len(losses) == HISTORY and 0 < loss <= (1 + self.factor * MIN_SPREAD) * min(losses):
            losses.append(loss)
            return None
        decision = detect_loss_spike(loss, list(losses), self.factor)
        if math.isfinite(loss):
            losses.append(loss)
        return decision.reason if decision.is_spike else None

    def check_grad_norm(self, norm: float) -> str | None:
        """The reason if this gradient norm is a spike, else None."""
        norms = self._norms
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        # The limit is at least `factor` times the smallest recent norm.
        is_clear = len(norms) == HISTORY and norm <= self.factor * min(norms)
        limit = math.inf if is_clear else grad_norm_limit(list(norms), self.factor)
        norms.append(norm)
        return f"the gradient norm {norm:.4g} is above {limit:.4g}" if norm > limit else None
