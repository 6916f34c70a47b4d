"""A model whose parameters every rank holds whole."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["ReplicatedModule"]


class ReplicatedModule(nn.Module):
    """Its parameters and, after `reduce_gradients`, their gradients are the same on `ranks` ranks."""

    @property
    def ranks(self) -> int:
        raise NotImplementedError

    def reduce_gradients(self) -> None:
        """Average the gradients over the ranks, after the last micro-batch of a step. A collective."""
        raise NotImplementedError

    def sparse_square(self) -> float:
        """This rank's part of the sum of squares of the step's gradients that no parameter has: those of tables."""
        return 0.0

    def scale_sparse(self, factor: Tensor) -> None:
        """Scale these gradients at the next step of the optimizer."""
