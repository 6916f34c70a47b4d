"""The response to loss and gradient spikes (train.on_spike): skip the update, or rewind to the last checkpoint."""

from __future__ import annotations

from lakh.loss_spikes import HISTORY, detect_loss_spike, grad_norm_limit
from lakh.spec import Training
from lakh.trainer.observability.step_metrics import StepMetrics

__all__ = ["SpikePolicy"]

MAX_REWINDS = 3  # from one checkpoint; more would mean that the data is not the cause


class SpikePolicy:
    def __init__(self, settings: Training) -> None:
        self._on_spike, self._factor = settings.on_spike, settings.spike_factor
        self._losses: dict[int, float] = {}  # by step, ascending
        self._norms: list[float] = []
        self._rewinds: dict[str, int] = {}  # by checkpoint
        self.spike: tuple[int, str] | None = None
        """The step that calls for a rewind, and the reason."""

    @property
    def max_norm(self) -> float:
        """The gradient norm above which the next update is skipped."""
        return grad_norm_limit(self._norms, self._factor) if self._on_spike == "skip" else float("inf")

    def observe(self, metrics: StepMetrics) -> None:
        if self._on_spike == "rewind":
            decision = detect_loss_spike(metrics.loss, list(self._losses.values()), self._factor)
            self.spike = (metrics.step, decision.reason) if decision.is_spike else None
        self._losses[metrics.step] = metrics.loss
        self._losses.pop(metrics.step - 2 * HISTORY, None)
        if metrics.applied:
            self._norms = [*self._norms[1 - HISTORY :], metrics.grad_norm]

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
