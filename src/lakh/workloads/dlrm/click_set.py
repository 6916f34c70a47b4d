"""A data set of clicks, and samples of it. Independent of torch.

Legend: S samples, F features with embeddings, N numeric features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = ["ClickSamples", "ClickSet"]


@dataclass(frozen=True, eq=False)
class ClickSamples:
    ids: np.ndarray
    """int32: the ids of all bags, all samples of the first feature first."""
    lengths_FS: np.ndarray
    """int32: ids of each bag."""
    dense_SN: np.ndarray
    """f32."""
    labels_S: np.ndarray
    """f32: 1 for a click, 0 for none."""


class ClickSet(Protocol):
    """A data set of clicks in the order of time."""

    fingerprint: str
    num_samples: int
    dense_features: int
    rows: list[int]
    """Ids of each feature."""
    max_lengths: list[int]
    """Ids of the longest bag of each feature."""

    def read(self, numbers: np.ndarray) -> ClickSamples:
        """The samples with these numbers, in this order."""
        ...
