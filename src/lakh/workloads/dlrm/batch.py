"""One micro-batch of a recommendation model: ids, dense features and clicks of B samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["ClickBatch"]


@dataclass(frozen=True, eq=False)
class ClickBatch:
    bags: Any
    """What the tables of the model take: JaggedBags, or DistributedBags for sharded tables."""
    dense_BN: Tensor
    """f32, numeric features."""
    labels_B: Tensor
    """f32: 1 for a click, 0 for none."""

    @property
    def batch(self) -> int:
        return len(self.labels_B)

    @property
    def device(self) -> torch.device:
        return self.labels_B.device

    def to(self, device: torch.device) -> ClickBatch:
        if self.device == device:
            return self
        return ClickBatch(self.bags.to(device), self.dense_BN.to(device), self.labels_B.to(device))

    def scale(self, micro_batches: int) -> float:
        """The factor of the sum of its losses, as one of a rank's micro-batches of a step."""
        return 1 / (self.batch * micro_batches)
