"""Matrix products of a block in 8-bit floats with a scale for each row of an operand (as torchao's `rowwise`).

Forward and input gradient: a scale for each token, and for each row of the weight as the product reads it. These may be
summed in less than float32. Weight gradient: the scales of the forward operand's tokens are multiplied into the
gradient, which then has one scale; the sum over tokens is in float32.

The gradient of a feed-forward's gate and up is rounded where it is computed, by bounds of its rows instead of their
largest magnitudes, which are not known there. e5m2 has a range of 2^30, of which the distance between the two takes
about 2^13; a float that is scaled by less than its range allows keeps its bits. docs/how-to/speed.md shows the cost in
loss.

Needs an NVIDIA GPU of compute capability 9.0 or newer, bf16, and sizes that are multiples of 16.

Shapes: N tokens, K inputs, M outputs, F the feed-forward's width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["rowwise_feed_forward", "rowwise_linear"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STEEPEST = 1.1
"""No slope of silu is larger."""


class _Weight(NamedTuple):
    data_MK: Tensor
    data_KM: Tensor
    scale_M: Tensor
    scale_K: Tensor
    largest: Tensor
    """Magnitude in the whole weight."""


def rowwise_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with operands rounded to 8 bits."""
    return _RowwiseLinear.apply(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[0])


def rowwise_feed_forward(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU with operands rounded to 8 bits."""
    return _RowwiseFeedForward.apply(x.flatten(0, -2), gate_up, down).view(x.shape)


class _RowwiseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor) -> Tensor:
        x, x_t, x_scale = _round_activation(x_NK)
        w = _round_weight(weight_MK)
        ctx.save_for_backward(x_t, x_scale, w.data_KM, w.scale_K)
        return _product(x, x_scale, w.data_MK, w.scale_M)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        from lakh.workloads.code.kernels.triton_fp8_rowwise import largest_of_rows

        x_t, x_scale, w_t, w_scale = ctx.saved_tensors
        grad = grad_outputs[0]
        g, g_t, g_scale, g_t_scale = _round_gradient(grad, largest_of_rows(grad), x_scale)
        return _product(g, g_scale, w_t, w_scale), _sum_over_tokens(g_t, g_t_scale, x_t)


class _RowwiseFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        from lakh.workloads.code.kernels.triton_fp8_rowwise import measured_swiglu, round_rows

        x, x_t, x_scale = _round_activation(x_NK)
        w1 = _round_weight(gate_up)
        both = _product(x, x_scale, w1.data_MK, w1.scale_M)
        inner_NF, rows, factors = measured_swiglu(both)
        inner, inner_t, inner_scale = round_rows(inner_NF, rows, E4M3)
        w2 = _round_weight(down)
        ctx.save_for_backward(
            both,
            factors,
            x_t,
            x_scale,
            inner_t,
            inner_scale,
            w1.data_KM,
            w1.scale_K,
            w2.data_KM,
            w2.scale_K,
            w2.largest,
        )
        return _product(inner, inner_scale, w2.data_MK, w2.scale_M)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        from lakh.workloads.code.kernels.triton_fp8_rowwise import largest_of_rows, rounded_swiglu_backward

        both, factors, x_t, x_scale, inner_t, inner_scale, w1_t, w1_scale, w2_t, w2_scale, w2_largest = (
            ctx.saved_tensors
        )
        grad = grad_outputs[0]
        rows = largest_of_rows(grad)
        g, g_t, g_scale, g_t_scale = _round_gradient(grad, rows, inner_scale)
        grad_down = _sum_over_tokens(g_t, g_t_scale, inner_t)
        grad_inner = _product(g, g_scale, w2_t, w2_scale)
        # |grad_inner| of a token is at most its largest gradient times the sum of a column's magnitudes. Rounding to 8
        # bits adds at most an eighth to each of the two, and rounding the product little.
        most_inner = rows * (w2_largest * (grad.shape[1] * 1.5))
        bounds = most_inner * factors * STEEPEST
        g, g_t, g_scale, g_t_scale = rounded_swiglu_backward(
            grad_inner, both, bounds, x_scale, (bounds * x_scale[:, 0]).amax(), E5M2
        )
        return _product(g, g_scale, w1_t, w1_scale), _sum_over_tokens(g_t, g_t_scale, x_t), grad_down


def _round_activation(x_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from lakh.workloads.code.kernels.triton_fp8_rowwise import largest_of_rows, round_rows

    result: tuple[Tensor, Tensor, Tensor] = round_rows(x_NK, largest_of_rows(x_NK), E4M3)
    return result


def _round_weight(weight_MK: Tensor) -> _Weight:
    from lakh.workloads.code.kernels.triton_fp8_rowwise import largest_of_both, round_both_axes

    rows, columns = largest_of_both(weight_MK)
    data_MK, data_KM, scale_M, scale_K = round_both_axes(weight_MK, rows, columns, E4M3)
    return _Weight(data_MK, data_KM, scale_M, scale_K, rows.amax())


def _round_gradient(grad_NM: Tensor, rows: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `round_gradient`, for a forward operand that has the factors `other`."""
    from lakh.workloads.code.kernels.triton_fp8_rowwise import round_gradient

    result: tuple[Tensor, ...] = round_gradient(grad_NM, rows, other, (rows * other[:, 0]).amax(), E5M2)
    return result  # type: ignore[return-value]


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """a @ b^T of operands with a scale for each row, summed in less than float32."""
    return torch._scaled_mm(
        a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _sum_over_tokens(g_MN: Tensor, g_scale: Tensor, x_KN: Tensor) -> Tensor:
    """g @ x^T of operands with one scale, which is that of g."""
    one = torch.ones_like(g_scale)
    return torch._scaled_mm(g_MN, x_KN.t(), scale_a=g_scale, scale_b=one, out_dtype=torch.bfloat16)
