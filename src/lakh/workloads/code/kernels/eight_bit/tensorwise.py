"""Matrix products of a block in 8-bit floats, forward and backward, with one dynamic scale per tensor: opt-in.

Activations and weights are rounded to e4m3 (3 bits of mantissa), gradients to e5m2 (2 bits, more range), each scaled by
its current maximum; sums are in float32. Cost: up to two more passes over every operand (triton_tensorwise.py), which
pays off for large products (models of a billion parameters and more). docs/how-to/speed.md shows the cost in loss.

Needs an NVIDIA GPU of compute capability 8.9 or newer, and sizes that are multiples of 16.

Shapes: N tokens, K inputs, M outputs. An operand is kept in the layout in which its next product reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["fp8_feed_forward", "fp8_linear"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with operands rounded to 8 bits."""
    return _Fp8Linear.apply(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[0])


def fp8_feed_forward(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU with operands rounded to 8 bits; the maxima of what is between the products cost no pass of their own."""
    return _Fp8FeedForward.apply(x.flatten(0, -2), gate_up, down).view(x.shape)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor) -> Tensor:
        x, x_t, x_scale = _rounded(x_NK, E4M3)
        w, w_t, w_scale = _rounded(weight_MK, E4M3)
        ctx.save_for_backward(x_t, x_scale, w_t, w_scale)
        ctx.dtypes = x_NK.dtype, weight_MK.dtype
        return _product(x, x_scale, w, w_scale, x_NK.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        x_t, x_scale, w_t, w_scale = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        g, g_t, g_scale = _rounded(grad_outputs[0], E5M2)
        return _product(g, g_scale, w_t, w_scale, x_dtype), _product(g_t, g_scale, x_t, x_scale, w_dtype)


class _Fp8FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        from lakh.workloads.code.kernels.eight_bit.triton_tensorwise import measured_swiglu

        x, x_t, x_scale = _rounded(x_NK, E4M3)
        w1, w1_t, w1_scale = _rounded(gate_up, E4M3)
        both = _product(x, x_scale, w1, w1_scale, x_NK.dtype, fast=True)
        inner_NF, found = measured_swiglu(both)
        inner, inner_t, inner_scale = _rounded(inner_NF, E4M3, found)
        w2, w2_t, w2_scale = _rounded(down, E4M3)
        ctx.save_for_backward(both, x_t, x_scale, w1_t, w1_scale, inner_t, inner_scale, w2_t, w2_scale)
        ctx.dtypes = x_NK.dtype, gate_up.dtype
        return _product(inner, inner_scale, w2, w2_scale, x_NK.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        from lakh.workloads.code.kernels.eight_bit.triton_tensorwise import measured_swiglu_backward

        both, x_t, x_scale, w1_t, w1_scale, inner_t, inner_scale, w2_t, w2_scale = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        g, g_t, g_scale = _rounded(grad_outputs[0], E5M2)
        grad_down = _product(g_t, g_scale, inner_t, inner_scale, w_dtype)
        grad_both, found = measured_swiglu_backward(_product(g, g_scale, w2_t, w2_scale, x_dtype), both)
        g, g_t, g_scale = _rounded(grad_both, E5M2, found)
        grad_x = _product(g, g_scale, w1_t, w1_scale, x_dtype)
        return grad_x, _product(g_t, g_scale, x_t, x_scale, w_dtype), grad_down


def _rounded(x_NK: Tensor, dtype: torch.dtype, found: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x in 8 bits, x^T in 8 bits, and their scale; `found` is its largest magnitude, where that is known."""
    from lakh.workloads.code.kernels.eight_bit.triton_tensorwise import largest, round_both

    return round_both(x_NK, largest(x_NK) if found is None else found, dtype)


def _product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """a @ b^T. `fast` sums in less than float32."""
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)
