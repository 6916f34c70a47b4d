"""A frozen matrix with a low-rank update as one operation: y = x W^T + (x A^T) B^T.

The update is added to the product in place, which plain torch and the compiler do not: they write it, read it and write
the sum, which for a feed-forward takes a third of the time of the product itself. There is no gradient of W. Kept for
the backward pass are x and x A^T.

Shapes: N tokens, I inputs, O outputs, R the rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lakh.workloads.code.kernels.nf4 import dequantize

__all__ = ["low_rank_linear"]

PARTS = 8
"""Into which a sum over tokens is split on a GPU: its output is so small that it would leave most of the GPU idle."""


def low_rank_linear(x: Tensor, w_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scales: Tensor | None = None) -> Tensor:
    """With `scales`, w is in 4 bits (nf4.py), and is expanded when it is used."""
    y: Tensor = _forward(x.flatten(0, -2), w_OI, a_RI, b_OR, scales)[0]
    return y.view(*x.shape[:-1], w_OI.shape[0])


def _expanded(w_OI: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    return w_OI if scales is None else dequantize(w_OI, scales, dtype)


@torch.library.custom_op("lakh::low_rank_linear", mutates_args=())
def _forward(x_NI: Tensor, w_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """y, and x A^T for the backward pass."""
    low_NR = x_NI @ a_RI.mT
    return (x_NI @ _expanded(w_OI, scales, x_NI.dtype).mT).addmm_(low_NR, b_OR.mT), low_NR


@_forward.register_fake
def _(x_NI: Tensor, w_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    tokens = x_NI.shape[0]
    return x_NI.new_empty(tokens, w_OI.shape[0]), x_NI.new_empty(tokens, a_RI.shape[0])


@torch.library.custom_op("lakh::low_rank_linear_backward", mutates_args=())
def _backward(
    grad_NO: Tensor,
    x_NI: Tensor,
    low_NR: Tensor,
    w_OI: Tensor,
    a_RI: Tensor,
    b_OR: Tensor,
    scales: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_low = grad_NO @ b_OR
    grad_x = (grad_NO @ _expanded(w_OI, scales, grad_NO.dtype)).addmm_(grad_low, a_RI)
    return grad_x, _sum_over_tokens(grad_low, x_NI), _sum_over_tokens(grad_NO, low_NR)


@_backward.register_fake
def _(
    grad_NO: Tensor,
    x_NI: Tensor,
    low_NR: Tensor,
    w_OI: Tensor,
    a_RI: Tensor,
    b_OR: Tensor,
    scales: Tensor | None,
) -> Any:
    return x_NI.new_empty(x_NI.shape), a_RI.new_empty(a_RI.shape), b_OR.new_empty(b_OR.shape)


def _sum_over_tokens(left_NJ: Tensor, right_NK: Tensor) -> Tensor:
    """left^T right."""
    tokens = len(left_NJ)
    if not left_NJ.is_cuda or tokens % PARTS:
        return left_NJ.mT @ right_NK
    left, right = (x.reshape(PARTS, tokens // PARTS, -1) for x in (left_NJ, right_NK))
    return torch.bmm(left.mT, right).sum(0, dtype=torch.float32).to(left.dtype)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x_NI, w_OI, a_RI, b_OR, scales = inputs
    ctx.save_for_backward(x_NI, output[1], w_OI, a_RI, b_OR, scales)
    ctx.set_materialize_grads(False)  # x A^T has no gradient of its own


def _gradient(ctx: Any, grad_y: Tensor, _: Any) -> Any:
    grad_x, grad_a, grad_b = _backward(grad_y.contiguous(), *ctx.saved_tensors)
    return grad_x, None, grad_a, grad_b, None


_forward.register_autograd(_gradient, setup_context=_setup)
