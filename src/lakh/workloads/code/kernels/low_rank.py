"""A frozen matrix with a low-rank update as one operation: y = x W^T + (x A^T) B^T; and a gated feed-forward of two.

The large product is added to the small one in place, which plain torch and the compiler do not: they write both, read
them and write the sum, which for a feed-forward takes a third of the time of the product itself. The feed-forward also
computes its activation again in the backward pass instead of keeping it. There is no gradient of W.

Shapes: N tokens, I inputs, O outputs, R the rank, F the feed-forward's width, S the rank of its second update.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lakh.workloads.code.kernels.nf4 import dequantize

__all__ = ["low_rank_feed_forward", "low_rank_linear"]

PARTS = 8
"""Into which a sum over tokens is split on a GPU: its output is so small that it would leave most of the GPU idle."""


def low_rank_linear(x: Tensor, w_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scales: Tensor | None = None) -> Tensor:
    """With `scales`, w is in 4 bits (nf4.py), and is expanded when it is used."""
    y: Tensor = _forward(x.flatten(0, -2), w_OI, a_RI, b_OR, scales)[0]
    return y.view(*x.shape[:-1], w_OI.shape[0])


def _expanded(w_OI: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    return w_OI if scales is None else dequantize(w_OI, scales, dtype)


def _product(x_NI: Tensor, w_OI: Tensor, scales: Tensor | None, low_NR: Tensor, b_OR: Tensor) -> Tensor:
    return (low_NR @ b_OR.mT).addmm_(x_NI, _expanded(w_OI, scales, x_NI.dtype).mT)


def _input_gradient(grad_NO: Tensor, w_OI: Tensor, scales: Tensor | None, grad_low: Tensor, a_RI: Tensor) -> Tensor:
    return (grad_low @ a_RI).addmm_(grad_NO, _expanded(w_OI, scales, grad_NO.dtype))


@torch.library.custom_op("lakh::low_rank_linear", mutates_args=())
def _forward(x_NI: Tensor, w_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """y, and x A^T for the backward pass."""
    low_NR = x_NI @ a_RI.mT
    return _product(x_NI, w_OI, scales, low_NR, b_OR), low_NR


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
    grad_x = _input_gradient(grad_NO, w_OI, scales, grad_low, a_RI)
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


# --- feed-forward: w1, a1, b1 of the fused gate-up matrix, w2, a2, b2 of the down matrix ---------------------


def low_rank_feed_forward(x: Tensor, gate_up: tuple[Any, ...], down: tuple[Any, ...]) -> Tensor:
    """SwiGLU; each matrix is given as (w, a, b, scales)."""
    (w1, a1, b1, scales1), (w2, a2, b2, scales2) = gate_up, down
    y: Tensor = _ffn(x.flatten(0, -2), w1, a1, b1, scales1, w2, a2, b2, scales2)[0]
    return y.view(x.shape)


def _swiglu(x_NF2: Tensor) -> Tensor:
    if x_NF2.is_cuda:
        from lakh.workloads.code.kernels import triton

        return triton.swiglu(x_NF2)
    gate, up = x_NF2.chunk(2, dim=-1)
    return F.silu(gate) * up


def _swiglu_backward(grad_NF: Tensor, x_NF2: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x, and swiglu(x) again."""
    if x_NF2.is_cuda:
        from lakh.workloads.code.kernels import triton

        return triton.swiglu_again(grad_NF, x_NF2)
    gate, up = x_NF2.chunk(2, dim=-1)
    open_ = torch.sigmoid(gate)
    silu = gate * open_
    return torch.cat((grad_NF * up * open_ * (1 + gate * (1 - open_)), grad_NF * silu), dim=-1), silu * up


@torch.library.custom_op("lakh::low_rank_feed_forward", mutates_args=())
def _ffn(
    x: Tensor,
    w1: Tensor,
    a1: Tensor,
    b1: Tensor,
    scales1: Tensor | None,
    w2: Tensor,
    a2: Tensor,
    b2: Tensor,
    scales2: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, and for the backward pass x a1^T, the gate-up product, and inner a2^T."""
    low1 = x @ a1.mT
    product = _product(x, w1, scales1, low1, b1)
    inner = _swiglu(product)
    low2 = inner @ a2.mT
    return _product(inner, w2, scales2, low2, b2), low1, product, low2


@_ffn.register_fake
def _(x: Tensor, w1: Tensor, a1: Tensor, b1: Any, s1: Any, w2: Tensor, a2: Tensor, b2: Tensor, s2: Any) -> Any:
    return tuple(x.new_empty(len(x), size) for size in (len(w2), len(a1), len(w1), len(a2)))


@torch.library.custom_op("lakh::low_rank_feed_forward_backward", mutates_args=())
def _ffn_backward(
    grad: Tensor,
    low1: Tensor,
    product: Tensor,
    low2: Tensor,
    x: Tensor,
    w1: Tensor,
    a1: Tensor,
    b1: Tensor,
    scales1: Tensor | None,
    w2: Tensor,
    a2: Tensor,
    b2: Tensor,
    scales2: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, a1, b1, a2 and b2."""
    grad_low2 = grad @ b2
    grad_b2 = _sum_over_tokens(grad, low2)
    grad_product, inner = _swiglu_backward(_input_gradient(grad, w2, scales2, grad_low2, a2), product)
    grad_a2 = _sum_over_tokens(grad_low2, inner)
    grad_low1 = grad_product @ b1
    grad_x = _input_gradient(grad_product, w1, scales1, grad_low1, a1)
    return grad_x, _sum_over_tokens(grad_low1, x), _sum_over_tokens(grad_product, low1), grad_a2, grad_b2


@_ffn_backward.register_fake
def _(
    grad: Any, low1: Any, product: Any, low2: Any, x: Tensor,
    w1: Any, a1: Tensor, b1: Tensor, s1: Any, w2: Any, a2: Tensor, b2: Tensor, s2: Any,
) -> Any:  # fmt: skip
    return tuple(tensor.new_empty(tensor.shape) for tensor in (x, a1, b1, a2, b2))


def _ffn_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output[1:], *inputs)
    ctx.set_materialize_grads(False)  # only the first output has a gradient


def _ffn_gradient(ctx: Any, grad: Tensor, *_: Any) -> Any:
    grad_x, grad_a1, grad_b1, grad_a2, grad_b2 = _ffn_backward(grad.contiguous(), *ctx.saved_tensors)
    return grad_x, None, grad_a1, grad_b1, None, None, grad_a2, grad_b2, None


_ffn.register_autograd(_ffn_gradient, setup_context=_ffn_setup)
