"""One micro-batch as the model takes it.

Shapes: B sequences, T tokens of a sequence. Tensors are on the device of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lakh.workloads.code.attention import Documents

__all__ = ["IGNORED", "Batch"]

IGNORED = -100  # a target that is not predicted, such as padding; torch's default for cross-entropy


@dataclass(frozen=True, eq=False)
class Batch:
    inputs: Tensor
    """B T, int64."""
    targets: Tensor
    """B T, int64: the token that follows each input, or IGNORED."""
    positions: Tensor | None = None
    """B T, int64: position inside the document, from 0. None counts from the start of the sequence."""
    documents: Documents | None = None
    """None where each sequence is one document."""
    weight: float | None = None
    """Factor of the sum of this micro-batch's losses that makes the sum over a rank's micro-batches the mean over all
    B x T positions of its step, padding counted as 0. None without padding: the mean of the micro-batches' means is
    the same. Either way the mean over data-parallel ranks does not depend on their number."""

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    def scale(self, micro_batches: int) -> float:
        """The factor of the sum of its losses, as one of a rank's micro-batches of a step."""
        return 1 / (self.targets.numel() * micro_batches) if self.weight is None else self.weight
