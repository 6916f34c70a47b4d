"""The loss of a recommendation model: cross-entropy of the clicks, in nats."""

from __future__ import annotations

from torch import Tensor, nn

from lakh.workloads.dlrm.batch import ClickBatch

__all__ = ["click_loss"]


def click_loss(logits_B: Tensor, batch: ClickBatch, scale: float | Tensor | None = None) -> Tensor:
    """`scale` times the sum over the samples; by default the mean."""
    losses_B = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels_B, reduction="none")
    return losses_B.mean() if scale is None else losses_B.sum() * scale
