"""Products whose operands are rounded to 8-bit floats and multiplied in float32: what `train.fp8` computes, on any
device. Slow; for the loss, not for the speed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["emulated_linear"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 1e-30
BLOCK = 128


def emulated_linear(recipe: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, weight) to x @ weight.T with the scales of a recipe."""
    return partial(_linear, recipe)


def _linear(recipe: str, x: Tensor, weight: Tensor) -> Tensor:
    return _EmulatedLinear.apply(x.flatten(0, -2), weight, recipe).view(*x.shape[:-1], weight.shape[0])


class _EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x_NK, weight_MK)
        ctx.recipe = recipe
        return _rounded(x_NK, E4M3, recipe) @ _rounded(weight_MK, E4M3, recipe).mT

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grad_outputs
        dtype = E4M3 if ctx.recipe == "blockwise" else E5M2
        grad_x = _rounded(grad, dtype, ctx.recipe) @ _rounded(weight.mT, E4M3, ctx.recipe).mT
        if ctx.recipe == "rowwise":  # the tokens' scales of x are multiplied into the gradient
            scale = _largest(x, "rowwise") / torch.finfo(E4M3).max
            x, grad = _rounded(x, E4M3, "rowwise") / scale, grad * scale
            return grad_x, _rounded(grad, dtype, "tensorwise").mT @ x, None
        return grad_x, _rounded(grad.mT, dtype, ctx.recipe) @ _rounded(x.mT, E4M3, ctx.recipe).mT, None


def _largest(x: Tensor, recipe: str) -> Tensor:
    found = x.abs().max() if recipe == "tensorwise" else x.abs().amax(-1, keepdim=True)
    return found.clamp_min(SMALLEST)


def _rounded(x: Tensor, dtype: torch.dtype, recipe: str) -> Tensor:
    if recipe == "blockwise" and x.shape[-1] % BLOCK == 0:
        return _rounded(x.unflatten(-1, (-1, BLOCK)), dtype, "rowwise").flatten(-2)
    factor = torch.finfo(dtype).max / _largest(x, recipe)
    return (x * factor).to(dtype).to(x.dtype) / factor
