"""The loss of the code model: mean next-token cross-entropy, in nats."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["next_token_loss"]


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor, *, reduction: str = "mean") -> Tensor:
    """Computed in float32 whatever the logits are: the sum over a vocabulary needs it."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction=reduction)
