"""The lookup as a function of autograd: gradients of rows go to their tables, not into `.grad`."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Lookup", "Tables"]


class Tables(Protocol):
    def lookup(self, bags: Any) -> Tensor: ...

    def keep_gradient(self, bags: Any, grad_BC: Tensor) -> None:
        """Keep the gradient of a lookup's result until the tables' optimizer steps."""


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tables: Tables, bags: Any) -> Tensor:
        """`anchor` needs a gradient, so that autograd calls backward although the tables are no inputs of it."""
        ctx.tables, ctx.bags = tables, bags
        return tables.lookup(bags)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.tables.keep_gradient(ctx.bags, grads[0])
        return None, None, None
