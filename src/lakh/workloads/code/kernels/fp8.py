"""Matrix products of a block in 8-bit floats, forward and backward, with one dynamic scale per tensor: opt-in.

Activations and weights are rounded to e4m3 (3 bits of mantissa), gradients to e5m2 (2 bits, more range), each scaled by
its current maximum; sums are in float32. Cost: two more passes over every operand, which pays off for large products
(models of a billion parameters and more). docs/how-to/speed.md shows the cost in loss.

Needs an NVIDIA GPU of compute capability 8.9 or newer, and sizes that are multiples of 16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["fp8_linear"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with operands rounded to 8 bits."""
    return _Fp8Linear.apply(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[0])


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor) -> Tensor:
        x8, x_scale = _quantize(x_NK, E4M3)
        w8, w_scale = _quantize(weight_MK, E4M3)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.dtypes = x_NK.dtype, weight_MK.dtype
        return torch._scaled_mm(x8, w8.t(), scale_a=x_scale, scale_b=w_scale, out_dtype=x_NK.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = _quantize(grad_outputs[0], E5M2)
        x_dtype, w_dtype = ctx.dtypes
        # The second operand must be column-major.
        grad_x = torch._scaled_mm(g8, _column_major(w8), scale_a=g_scale, scale_b=w_scale, out_dtype=x_dtype)
        grad_w = torch._scaled_mm(
            g8.t().contiguous(), _column_major(x8), scale_a=g_scale, scale_b=x_scale, out_dtype=w_dtype
        )
        return grad_x, grad_w


def _quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in 8 bits, and its scale."""
    largest = x.abs().amax().float().clamp_min(1e-12)
    factor = torch.finfo(dtype).max / largest
    return (x.float() * factor).to(dtype), 1 / factor


def _column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()
