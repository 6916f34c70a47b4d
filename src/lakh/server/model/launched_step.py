"""A step that was launched: what its reader needs, while a GPU may still compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

__all__ = ["LaunchedStep"]


class LaunchedStep(NamedTuple):
    logits: Tensor
    """Of the scored tokens, chunk after chunk, on the device: valid until the next step."""
    most_likely: Callable[[], list[int]]
    """Waits for the device; returns the id with the largest logit of each scored token."""
