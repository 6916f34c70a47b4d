"""Matrix products of a block in 8-bit floats with a scale for each 128 numbers (arXiv 2412.19437, section 3.3).

Every operand has a scale for each 128 numbers along the sum, and is e4m3: so few numbers need no larger range. An
outlier costs its 127 neighbours their range, not the tensor. Weights have no squares of 128 x 128 with one scale: torch
versions differ in the layout of these scales.

Needs an NVIDIA GPU of compute capability 9.0, bf16, and sizes that are multiples of 128, also the tokens of a pass.

Shapes: N tokens, K inputs, M outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lakh.errors import UserError
from lakh.workloads.code.fp8_check import FP8_BLOCK

__all__ = ["blockwise_linear"]

E4M3 = torch.float8_e4m3fn
BLOCK = FP8_BLOCK


def blockwise_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with operands rounded to 8 bits."""
    tokens = x.numel() // x.shape[-1]
    if tokens % BLOCK:
        found = f"a micro-batch has {tokens} tokens on a rank, not a multiple of {BLOCK}"
        raise UserError("train.fp8_recipe = blockwise", found, "change data.sequence or data.micro_batch")
    return _BlockwiseLinear.apply(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[0])


class _BlockwiseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor) -> Tensor:
        from lakh.workloads.code.kernels.eight_bit.triton_blockwise import round_blocks

        x, x_t, x_scale, x_t_scale = round_blocks(x_NK, E4M3)
        w, w_t, w_scale, w_t_scale = round_blocks(weight_MK, E4M3)
        ctx.save_for_backward(x_t, x_t_scale, w_t, w_t_scale)
        return _product(x, x_scale, w, w_scale)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        from lakh.workloads.code.kernels.eight_bit.triton_blockwise import round_blocks

        x_t, x_t_scale, w_t, w_t_scale = ctx.saved_tensors
        g, g_t, g_scale, g_t_scale = round_blocks(grad_outputs[0], E4M3)
        return _product(g, g_scale, w_t, w_t_scale), _product(g_t, g_t_scale, x_t, x_t_scale)


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """a @ b^T, summed in float32."""
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=torch.bfloat16)
