"""Products whose operands are rounded to 8-bit floats and multiplied in the precision of their input: what `train.fp8`
computes, on any device, and variants of it in which only some operands are rounded. Slow; for the loss, not for the
speed. Sums are in float32 throughout.

Shapes: N tokens, K inputs, M outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["EMULATED", "EmulatedRecipe", "emulated_linear"]

E4M3, E5M2, BF16, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.int8
SMALLEST = 1e-30
BLOCK = 128


@dataclass(frozen=True)
class EmulatedRecipe:
    """What the operands of the three products of a layer are rounded to; None leaves one as it is."""

    scaling: str = "rowwise"
    x: torch.dtype | None = E4M3
    weight: torch.dtype | None = E4M3
    dx_grad: torch.dtype | None = E4M3
    """The gradient in the product that makes the input's gradient, and the weight beside it."""
    dx_weight: torch.dtype | None = E4M3
    dw_grad: torch.dtype | None = E4M3
    """The gradient in the product that makes the weight's gradient, and the input beside it."""
    dw_x: torch.dtype | None = E4M3
    stochastic: bool = False
    """Gradients are rounded up or down at random, so that their mean is kept."""


_NONE = EmulatedRecipe(x=None, weight=None, dx_grad=None, dx_weight=None, dw_grad=None, dw_x=None)
_E5M2 = EmulatedRecipe(dx_grad=E5M2, dw_grad=E5M2)
EMULATED = {
    "tensorwise": replace(_E5M2, scaling="tensorwise"),
    "rowwise": EmulatedRecipe(),
    "int8_forward": EmulatedRecipe(x=INT8, weight=INT8),
    "blockwise": EmulatedRecipe(scaling="blockwise"),
    "bf16": EmulatedRecipe(x=BF16, weight=BF16, dx_grad=BF16, dx_weight=BF16, dw_grad=BF16, dw_x=BF16),
    "rowwise-e5m2": _E5M2,
    "rowwise-e4m3-dx": replace(_E5M2, dx_grad=E4M3),
    "rowwise-e4m3-dw": replace(_E5M2, dw_grad=E4M3),
    "rowwise-stochastic": replace(_E5M2, stochastic=True),
    "rowwise-exact-dw": replace(_E5M2, dw_grad=None, dw_x=None),
    "rowwise-exact-dx": replace(_E5M2, dx_grad=None, dx_weight=None),
    "rowwise-exact-backward": replace(_NONE, x=E4M3, weight=E4M3),
    "int8_forward-exact-backward": replace(_NONE, x=INT8, weight=INT8),
    "rowwise-exact-forward": replace(_E5M2, x=None, weight=None),
    "only-x": replace(_NONE, x=E4M3),
    "only-weight": replace(_NONE, weight=E4M3),
    "only-dx-grad-e5m2": replace(_NONE, dx_grad=E5M2),
    "only-dx-grad-e4m3": replace(_NONE, dx_grad=E4M3),
    "only-dx-weight": replace(_NONE, dx_weight=E4M3),
    "only-dw-grad-e5m2": replace(_NONE, dw_grad=E5M2),
    "only-dw-grad-e4m3": replace(_NONE, dw_grad=E4M3),
    "only-dw-x": replace(_NONE, dw_x=E4M3),
}
"""By name: the recipes of `train.fp8_recipe`, the control (operands in bf16), and variants of the row-wise recipe."""


def emulated_linear(recipe: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, weight) to x @ weight.T with the scales and types of a recipe."""
    return partial(_linear, EMULATED[recipe])


def _linear(recipe: EmulatedRecipe, x: Tensor, weight: Tensor) -> Tensor:
    return _EmulatedLinear.apply(x.flatten(0, -2), weight, recipe).view(*x.shape[:-1], weight.shape[0])


class _EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor, recipe: EmulatedRecipe) -> Tensor:
        ctx.save_for_backward(x_NK, weight_MK)
        ctx.recipe = recipe
        scaling = recipe.scaling
        return _product(_rounded(x_NK, recipe.x, scaling), _rounded(weight_MK, recipe.weight, scaling), x_NK.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grad_outputs
        recipe: EmulatedRecipe = ctx.recipe
        scaling, random = recipe.scaling, recipe.stochastic
        w_t = _rounded(weight.mT, recipe.dx_weight, scaling)
        grad_x = _product(_rounded(grad, recipe.dx_grad, scaling, random), w_t, x.dtype)
        if scaling == "rowwise":  # the tokens' scales of x are multiplied into the gradient
            is_int8 = recipe.x == INT8 and recipe.dw_x is not None
            values, scale = _rounded(x, INT8 if is_int8 else recipe.dw_x, "rowwise")
            if is_int8:  # kept from the forward pass, and rounded again
                values = _nearest(values, E4M3, random=False)
            g = _rounded((grad.float() * scale).mT, recipe.dw_grad, "tensorwise", random)
            return grad_x, _product(g, (values.mT, torch.ones_like(scale[:1])), weight.dtype), None
        x_t = _rounded(x.mT, recipe.dw_x, scaling)
        return grad_x, _product(_rounded(grad.mT, recipe.dw_grad, scaling, random), x_t, weight.dtype), None


def _largest(x: Tensor, scaling: str) -> Tensor:
    found = x.abs().max().view(1, 1) if scaling == "tensorwise" else x.abs().amax(-1, keepdim=True)
    return found.clamp_min(SMALLEST)


def _rounded(x: Tensor, dtype: torch.dtype | None, scaling: str, random: bool = False) -> tuple[Tensor, Tensor]:
    """Numbers of a type in float32, and the factors of their rows."""
    x = x.float()
    if dtype is None or dtype == BF16:
        return (x if dtype is None else x.to(dtype).float()), x.new_ones(1, 1).expand(len(x), 1)
    if scaling == "blockwise" and x.shape[-1] % BLOCK == 0:
        values, scale = _rounded(x.unflatten(-1, (-1, BLOCK)), dtype, "rowwise", random)
        return (values * scale).flatten(-2), x.new_ones(len(x), 1)
    scale = _largest(x, scaling) / (torch.iinfo if dtype == INT8 else torch.finfo)(dtype).max
    return _nearest(x / scale, dtype, random), scale


def _nearest(x: Tensor, dtype: torch.dtype, random: bool) -> Tensor:
    """A number of the type beside each of x, in float32."""
    if dtype == INT8:
        return x.add(0.5).floor_()  # as the kernels round
    if x.is_cuda and not random:
        return x.to(dtype).float()
    info = torch.finfo(dtype)  # on a CPU this is faster than a conversion to 8 bits and back, and equal to it
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min_(info.smallest_normal)
    step = power.mul_(info.eps)
    x = x / step
    return (x.add_(torch.rand_like(x)).floor_() if random else x.round_()).mul_(step)


def _product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """a @ b^T; 8-bit numbers are exact in `dtype`."""
    return ((a[0].to(dtype) @ b[0].to(dtype).mT).float() * a[1] * b[1].mT).to(dtype)
