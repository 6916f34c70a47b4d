"""x @ weight.T, whose gradient with respect to x is a product that reads the weight's transpose.

The same numbers as F.linear. What differs is how the weight lies in memory for the product of the backward pass: laid
out anew, that product runs with both operands along the summed dim, as the forward product does, which the libraries'
kernels of an H100 or H200 like better. Laying it out costs one pass over the weight, which a step's thousands of tokens
pay for.

On a GPU the transpose is a Triton kernel: torch's own copy reads or writes it in strides. A custom operator, because
the compiler would undo it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["linear", "transposed"]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for x of any number of dims."""
    return _Linear.apply(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor) -> Tensor:
        ctx.save_for_backward(x_NK, weight_MK)
        return x_NK @ weight_MK.t()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad_NM,) = grad_outputs
        x_NK, weight_MK = ctx.saved_tensors
        return grad_NM @ transposed(weight_MK).t(), grad_NM.t() @ x_NK


@torch.library.custom_op("lakh::transposed", mutates_args=())
def transposed(x: Tensor) -> Tensor:
    """The transpose of a matrix, laid out row by row."""
    if x.device.type != "cuda":
        return x.t().contiguous()
    from lakh.workloads.code import kernels

    return kernels.transpose(x)


@transposed.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])
