"""The response to loss and gradient spikes (train.on_spike): skip the update, or rewind to the last checkpoint.

Updates that are not finite are always skipped. A run without others does not go on: it would only use the machines.
"""

from __future__ import annotations

import math

from lakh.errors import UserError
from lakh.loss_spikes import HISTORY, detect_loss_spike, grad_norm_limit
from lakh.spec import Training
from lakh.trainer.observability.step_metrics import StepMetrics

__all__ = ["SpikePolicy"]

MAX_REWINDS = 3  # from one checkpoint; more would mean that the data is not the cause
MAX_NOT_FINITE = 64  # updates in a row; fewer may come from bad sequences beside each other


class SpikePolicy:
    def __init__(self, settings: Training) -> None:
        self._on_spike, self._factor = settings.on_spike, settings.spike_factor
        self._losses: dict[int, float] = {}  # by step, ascending
        self._norms: list[float] = []
        self._rewinds: dict[str, int] = {}  # by checkpoint
        self._observed = self._not_finite = 0  # updates, and the last ones in a row that were not finite
        self.spike: tuple[int, str] | None = None
        """The step that calls for a rewind, and the reason."""

    @property
    def max_norm(self) -> float:
        """The gradient norm above which the next update is skipped."""
        return grad_norm_limit(self._norms, self._factor) if self._on_spike == "skip" else float("inf")

    def observe(self, metrics: StepMetrics) -> None:
        """Raises UserError after MAX_NOT_FINITE updates in a row that were not finite."""
        self._observed += 1
        self._not_finite = 0 if math.isfinite(metrics.grad_norm) else self._not_finite + 1
        if self._not_finite == MAX_NOT_FINITE:
            self._raise_not_finite(metrics.step)
        if self._on_spike == "rewind":
            decision = detect_loss_spike(metrics.loss, list(self._losses.values()), self._factor)
            self.spike = (metrics.step, decision.reason) if decision.is_spike else None
        self._losses[metrics.step] = metrics.loss
        self._losses.pop(metrics.step - 2 * HISTORY, None)
        if metrics.applied:
            self._norms = [*self._norms[1 - HISTORY :], metrics.grad_norm]

    def require_update(self, step: int) -> None:
        """Raises UserError at the end of a run whose updates were all skipped because they were not finite."""
        if self._observed and self._not_finite == self._observed:
            self._raise_not_finite(step)

    def _raise_not_finite(self, step: int) -> None:
        first = step - self._not_finite + 1
        raise UserError(
            f"steps {first} to {step}",
            f"the gradient of each is not finite, so nothing was trained since step {first - 1}",
            "go on from an earlier checkpoint (lakh checkpoint list) with a lower optim.lr, or look at the sequences "
            "of these steps (lakh tokens stream RUN --show POSITION)",
        )

    def loss_at(self, step: int) -> float:
        return self._losses.get(step, float("nan"))

    def refuse_rewind(self, checkpoint: str) -> str:
        """The reason not to rewind to this checkpoint; empty if the rewind may happen, which is counted."""
        self._rewinds[checkpoint] = self._rewinds.get(checkpoint, 0) + 1
        if not checkpoint:
            return "there is no checkpoint to go back to"
        return f"{MAX_REWINDS} rewinds did not help" if self._rewinds[checkpoint] > MAX_REWINDS else ""

    def rewound(self, to_step: int) -> None:
        self._losses = {step: loss for step, loss in self._losses.items() if step <= to_step}
