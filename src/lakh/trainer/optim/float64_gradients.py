"""The gradients of micro-batches, added in float64, of a model without FSDP, which does it itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Float64Gradients"]


class Float64Gradients:
    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._sums: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def add(self) -> None:
        """Move the gradients of a micro-batch to the sums."""
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if parameter in self._sums:
                self._sums[parameter] += parameter.grad
            else:
                self._sums[parameter] = parameter.grad.double()
            parameter.grad = None

    def store(self) -> None:
        """Set the gradients to the sums, in the parameters' type."""
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)
