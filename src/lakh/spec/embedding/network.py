"""The dense network of a recommendation model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from lakh import config

__all__ = ["ClickNetwork"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClickNetwork:
    interaction: Literal["dot", "cross"] = "dot"
    """How features interact: inner products (DLRM), or cross layers (DCNv2)."""
    dense_features: int = 13
    """Numeric features of a sample."""
    bottom: tuple[int, ...] = (512, 256)
    """Hidden widths of the MLP over the numeric features; its output has the width of an embedding."""
    top: tuple[int, ...] = (1024, 1024, 512, 256)
    """Hidden widths of the MLP that gives the logit."""
    cross_layers: int = 3
    """Cross layers of "cross"."""
    cross_rank: int = 512
    """Rank of the matrices of a cross layer."""

    def __post_init__(self) -> None:
        config.require_positive(self, "dense_features", "cross_layers", "cross_rank")
        for name in ("bottom", "top"):
            config.require(self, name, lambda widths: all(w > 0 for w in widths), "has a width below 1", "remove it")

    def parameters(self, embeddings: int, width: int) -> int:
        """Weights and biases, for this number of pooled embeddings of a sample."""
        vectors = embeddings + 1  # and the output of the bottom MLP
        columns, cross = vectors * width, 0
        if self.interaction == "dot":
            columns = width + vectors * (vectors - 1) // 2
        else:
            cross = self.cross_layers * (2 * columns * self.cross_rank + columns)
        layers = [*itertools.pairwise([self.dense_features, *self.bottom, width])]
        layers += itertools.pairwise([columns, *self.top, 1])
        return cross + sum((inner + 1) * outer for inner, outer in layers)
