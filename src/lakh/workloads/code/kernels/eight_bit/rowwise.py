"""Matrix products of a block in 8 bits with a scale for each row of an operand (as torchao's `rowwise`).

Forward and input gradient: a scale for each token, and for each row of the weight as the product reads it. These may be
summed in less than float32. Weight gradient: the scales of the forward operand's tokens are multiplied into the
gradient, which then has one scale; the sum over tokens is in float32.

All operands are e4m3, gradients too: with a scale of its own a token's gradient does not need the range of e5m2, whose
rounding has four times the variance. With `forward=torch.int8` those of the forward product are integers, whose steps
are a third of e4m3's error where a row has no outliers; nearly all of the loss that e4m3 costs comes from the forward
product. The backward pass reads them in e4m3. docs/how-to/speed.md shows the cost in loss.

The gradient of a feed-forward's gate and up is rounded where it is computed, by bounds of its rows instead of their
largest magnitudes, which are not known there: the largest gradient of the activation times its largest input. They are
a few times too large. A number keeps all bits of e4m3 while it is less than 2^15 below its bound.

Needs an NVIDIA GPU of compute capability 9.0 or newer, bf16, and sizes that are multiples of 16.

Shapes: N tokens, K inputs, M outputs, F the feed-forward's width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["rowwise_feed_forward", "rowwise_linear", "rowwise_linear_norm_feed_forward", "rowwise_norm_linear"]

E4M3 = torch.float8_e4m3fn
STEEPEST = 1.1
"""No slope of silu is larger."""


class _Weight(NamedTuple):
    data_MK: Tensor
    data_KM: Tensor
    scale_M: Tensor
    scale_K: Tensor


def rowwise_linear(x: Tensor, weight: Tensor, forward: torch.dtype = E4M3) -> Tensor:
    """x @ weight.T with operands rounded to 8 bits."""
    return _RowwiseLinear.apply(x.flatten(0, -2), weight, forward).view(*x.shape[:-1], weight.shape[0])


def rowwise_feed_forward(x: Tensor, gate_up: Tensor, down: Tensor, forward: torch.dtype = E4M3) -> Tensor:
    """SwiGLU with operands rounded to 8 bits."""
    return _RowwiseFeedForward.apply(x.flatten(0, -2), gate_up, down, forward).view(x.shape)


def rowwise_norm_linear(
    x: Tensor, delta: Tensor, norm: Tensor, eps: float, weight: Tensor, forward: torch.dtype = E4M3
) -> tuple[Tensor, Tensor]:
    """x + delta, and the product of its norm with operands rounded to 8 bits; the norm is written in 8 bits only."""
    total, y = _RowwiseNormLinear.apply(x.flatten(0, -2), delta.flatten(0, -2), norm, eps, weight, forward)
    return total.view(x.shape), y.view(*x.shape[:-1], weight.shape[0])


def rowwise_linear_norm_feed_forward(
    y: Tensor,
    output: Tensor,
    x: Tensor,
    norm: Tensor,
    eps: float,
    gate_up: Tensor,
    down: Tensor,
    forward: torch.dtype = E4M3,
) -> tuple[Tensor, Tensor]:
    """x + y @ output.T, and the SwiGLU of its norm, as one operation, which measures the gradient of the sum where it
    is computed."""
    total, result = _RowwiseLinearNormFeedForward.apply(
        y.flatten(0, -2), output, x.flatten(0, -2), norm, eps, gate_up, down, forward
    )
    return total.view(x.shape), result.view(x.shape)


class _RowwiseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor, forward: torch.dtype) -> Tensor:
        y, saved = _linear(*_round_activation(x_NK, forward), weight_MK)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return *_linear_backward(grad_outputs[0], None, *ctx.saved_tensors), None


class _RowwiseFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, gate_up: Tensor, down: Tensor, forward: torch.dtype) -> Tensor:
        y, saved = _feed_forward(*_round_activation(x_NK, forward), gate_up, down)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return *_feed_forward_backward(grad_outputs[0], *ctx.saved_tensors), None


class _RowwiseNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NK: Tensor, delta_NK: Tensor, norm: Tensor, eps: float, weight_MK: Tensor, forward: torch.dtype
    ) -> Any:
        total, h, h_scale = _add_norm(x_NK, delta_NK, norm, eps, forward)
        y, saved = _linear(h, h_scale, weight_MK)
        ctx.save_for_backward(total, norm, *saved)
        ctx.eps = eps
        return total, y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        from lakh.workloads.code.kernels.triton import add_norm_backward

        grad_total, grad = grad_outputs
        total, norm, *saved = ctx.saved_tensors
        grad_h, grad_weight = _linear_backward(grad, None, *saved)
        grad_x, grad_norm = add_norm_backward(grad_total, grad_h, total, norm, ctx.eps)
        return grad_x, grad_x, grad_norm, None, grad_weight, None


class _RowwiseLinearNormFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_NM: Tensor,
        output: Tensor,
        x_NK: Tensor,
        norm: Tensor,
        eps: float,
        gate_up: Tensor,
        down: Tensor,
        forward: torch.dtype,
    ) -> Any:
        delta, saved = _linear(*_round_activation(y_NM, forward), output)
        total, h, h_scale = _add_norm(x_NK, delta, norm, eps, forward)
        result, more = _feed_forward(h, h_scale, gate_up, down)
        ctx.save_for_backward(total, norm, *saved, *more)
        ctx.eps, ctx.num_saved = eps, len(saved)
        return total, result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        from lakh.workloads.code.kernels.triton import measured_add_norm_backward

        grad_total, grad = grad_outputs
        total, norm, *both = ctx.saved_tensors
        saved, more = both[: ctx.num_saved], both[ctx.num_saved :]
        grad_h, grad_gate_up, grad_down = _feed_forward_backward(grad, *more)
        grad_x, grad_norm, rows = measured_add_norm_backward(grad_total, grad_h, total, norm, ctx.eps)
        grad_y, grad_output = _linear_backward(grad_x, rows, *saved)
        return grad_y, grad_output, grad_x, grad_norm, None, grad_gate_up, grad_down, None


def _add_norm(
    x_NK: Tensor, delta_NK: Tensor, norm: Tensor, eps: float, forward: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    from lakh.workloads.code.kernels.eight_bit.triton_whole_rows import rounded_add_norm

    result: tuple[Tensor, Tensor, Tensor] = rounded_add_norm(x_NK, delta_NK, norm, eps, forward)
    return result


def _linear(x_NK: Tensor, x_scale: Tensor, weight_MK: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The product of an operand in 8 bits, and what its backward pass needs."""
    from lakh.workloads.code.kernels.eight_bit.triton_whole_rows import transposed

    w = _round_weight(weight_MK, x_NK.dtype)
    return _product(x_NK, x_scale, w.data_MK, w.scale_M), (transposed(x_NK), x_scale, w.data_KM, w.scale_K)


def _linear_backward(
    grad: Tensor, rows: Tensor | None, x_t: Tensor, x_scale: Tensor, w_t: Tensor, w_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of operand and weight; `rows` are the largest magnitudes of the gradient's rows, if known."""
    from lakh.workloads.code.kernels.eight_bit.triton_rowwise import largest_of_rows

    rows = largest_of_rows(grad) if rows is None else rows
    g, g_t, g_scale, g_t_scale = _round_gradient(grad, rows, x_scale)
    return _product(g, g_scale, w_t, w_scale), _sum_over_tokens(g_t, g_t_scale, x_t)


def _feed_forward(x_NK: Tensor, x_scale: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """SwiGLU of an operand in 8 bits, and what its backward pass needs."""
    from lakh.workloads.code.kernels.eight_bit.triton_whole_rows import rounded_swiglu, transposed

    w1 = _round_weight(gate_up, x_NK.dtype)
    both = _product(x_NK, x_scale, w1.data_MK, w1.scale_M)
    inner, inner_scale, factors = rounded_swiglu(both, x_NK.dtype)
    w2 = _round_weight(down, x_NK.dtype)
    y = _product(inner, inner_scale, w2.data_MK, w2.scale_M)
    first = (both, factors, transposed(x_NK), x_scale, w1.data_KM, w1.scale_K)
    return y, (*first, transposed(inner), inner_scale, w2.data_KM, w2.scale_K)


def _feed_forward_backward(
    grad: Tensor,
    both: Tensor,
    factors: Tensor,
    x_t: Tensor,
    x_scale: Tensor,
    w1_t: Tensor,
    w1_scale: Tensor,
    inner_t: Tensor,
    inner_scale: Tensor,
    w2_t: Tensor,
    w2_scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the operand and of both weights."""
    from lakh.workloads.code.kernels.eight_bit.triton_rowwise import largest_of_rows, rounded_swiglu_backward

    g, g_t, g_scale, g_t_scale = _round_gradient(grad, largest_of_rows(grad), inner_scale)
    grad_down = _sum_over_tokens(g_t, g_t_scale, inner_t)
    grad_inner = _product(g, g_scale, w2_t, w2_scale)
    bounds = largest_of_rows(grad_inner) * factors * STEEPEST
    g, g_t, g_scale, g_t_scale = rounded_swiglu_backward(
        grad_inner, both, bounds, x_scale, (bounds * x_scale[:, 0]).amax(), E4M3
    )
    return _product(g, g_scale, w1_t, w1_scale), _sum_over_tokens(g_t, g_t_scale, x_t), grad_down


def _round_activation(x_NK: Tensor, forward: torch.dtype) -> tuple[Tensor, Tensor]:
    from lakh.workloads.code.kernels.eight_bit.triton_whole_rows import round_whole_rows

    result: tuple[Tensor, Tensor] = round_whole_rows(x_NK, forward)
    return result


def _round_weight(weight_MK: Tensor, forward: torch.dtype) -> _Weight:
    from lakh.workloads.code.kernels.eight_bit.triton_rowwise import largest_of_both, round_both_axes

    rows, columns = largest_of_both(weight_MK)
    data_MK, data_KM, scale_M, scale_K = round_both_axes(weight_MK, rows, columns, forward, E4M3)
    return _Weight(data_MK, data_KM, scale_M, scale_K)


def _round_gradient(grad_NM: Tensor, rows: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `round_gradient`, for a forward operand that has the factors `other`."""
    from lakh.workloads.code.kernels.eight_bit.triton_rowwise import round_gradient

    result: tuple[Tensor, ...] = round_gradient(grad_NM, rows, other, (rows * other[:, 0]).amax(), E4M3)
    return result  # type: ignore[return-value]


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """a @ b^T of operands with a scale for each row; e4m3 is summed in less than float32."""
    if a.dtype == torch.int8:
        from lakh.workloads.code.kernels.eight_bit.int8_product import int8_product

        result: Tensor = int8_product(a, a_scale, b, b_scale)
        return result
    return torch._scaled_mm(
        a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _sum_over_tokens(g_MN: Tensor, g_scale: Tensor, x_KN: Tensor) -> Tensor:
    """g @ x^T of operands with one scale, which is that of g."""
    one = torch.ones_like(g_scale)
    return torch._scaled_mm(g_MN, x_KN.t(), scale_a=g_scale, scale_b=one, out_dtype=torch.bfloat16)
