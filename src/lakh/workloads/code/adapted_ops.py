"""Operations on matrices that have low-rank adapters (adapters.py).

The product of a fused matrix (queries, keys and values) stays one product; its adapters become one more pair, with B
block-diagonal (kernels/low_rank.py). No gradient of W is computed: that is where the speed comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from lakh.workloads.code.kernels.low_rank import AdaptedMatrix, low_rank_feed_forward, low_rank_linear, stacked
from lakh.workloads.code.kernels.low_rank_block import low_rank_linear_norm_feed_forward, low_rank_norm_linear
from lakh.workloads.code.ops import ModelOps

__all__ = ["adapted_ops", "low_rank"]


def low_rank(
    base: Tensor, modules: Sequence[nn.Module], scale: float, scales: Tensor | None, wide: Tensor | None
) -> Tensor:
    """The fused matrix of these modules with their adapters, for `adapted_ops`; as it is, where none has any."""
    a, b, starts, rows = [], [], [], 0
    for module in cast("Sequence[Any]", modules):
        if hasattr(module, "lora_a"):
            a.append(module.lora_a)
            b.append(module.lora_b)
            starts.append(rows)
        rows += getattr(module, "out_features", 0)
    # A block passes its matrices to ops.linear and to nothing else.
    return cast("Tensor", AdaptedMatrix(base, a, b, starts, scale, scales, wide)) if a else base


def adapted_ops(ops: ModelOps) -> ModelOps:
    """`ops` whose products also take an AdaptedMatrix."""

    def linear(x: Tensor, weight: Any) -> Tensor:
        if not isinstance(weight, AdaptedMatrix):
            return ops.linear(x, weight)
        if ops.linear is F.linear or weight.scales is not None:
            return low_rank_linear(x, weight)
        a, b = stacked(weight, x.dtype)
        return ops.linear(x, weight.base) + F.linear(F.linear(x, a), b)

    def feed_forward(x: Tensor, gate_up: Any, down: Any) -> Tensor:
        is_adapted = isinstance(gate_up, AdaptedMatrix) and isinstance(down, AdaptedMatrix)
        if is_adapted and ops.linear is F.linear and x.is_cuda:
            return low_rank_feed_forward(x, gate_up, down)
        return linear(ops.activation(linear(x, gate_up)), down)

    def norm_linear(x: Tensor, delta: Tensor, norm: Tensor, eps: float, weight: Any) -> tuple[Tensor, Tensor]:
        if _is_wide(weight):
            return low_rank_norm_linear(x, delta, norm, eps, weight)
        x, h = ops.norm_add(x, delta, norm, eps)
        return x, linear(h, weight)

    def linear_norm_feed_forward(
        y: Tensor, output: Any, x: Tensor, norm: Tensor, eps: float, gate_up: Any, down: Any
    ) -> tuple[Tensor, Tensor]:
        if _is_wide(output) and _is_wide(gate_up) and _is_wide(down):
            return low_rank_linear_norm_feed_forward(y, output, x, norm, eps, gate_up, down)
        x, h = ops.norm_add(x, linear(y, output), norm, eps)
        return x, feed_forward(h, gate_up, down)

    adapted = ops.with_products(linear, feed_forward)
    if ops.linear is not F.linear or ops.tensor_parallel > 1:
        return adapted
    return replace(adapted, fused_norm_linear=norm_linear, fused_linear_norm_feed_forward=linear_norm_feed_forward)


def _is_wide(weight: Any) -> bool:
    return isinstance(weight, AdaptedMatrix) and weight.wide is not None
