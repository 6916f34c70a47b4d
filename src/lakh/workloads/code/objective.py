"""What training minimizes beside the next-token loss."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PLAIN", "Objective"]


@dataclass(frozen=True)
class Objective:
    """Terms that training adds to the next-token loss; evaluation uses PLAIN."""

    z_loss: float = 0.0
    """Factor of the squared log of the softmax's sum, per token."""
    label_smoothing: float = 0.0
    """Share of a target's weight that goes to all tokens of the vocabulary alike, as in torch's cross_entropy."""


PLAIN = Objective()
