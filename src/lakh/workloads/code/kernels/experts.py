"""A mixture of experts as three grouped products, with one sort of the tokens and no padding.

    rows of x, in the order of their experts -> gate-up product -> weighted SwiGLU -> down product -> sum per token

The routing weight of a token multiplies the inner activations, inside the SwiGLU: down is linear, so the output is the
same, and no output of single experts is kept for the gradient of the weight. Kept for the backward pass are x, the
gate-up product and the order; the rows and the inner activations are computed again, each in one pass.

Shapes: N tokens, K experts of each, S = N K rows, E experts, W width, F inner size of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["can_group", "gather_sum", "grouped_experts", "weighted_swiglu", "weighted_swiglu_backward"]


def can_group(x: Tensor, down_EWF: Tensor) -> bool:
    """Grouped products are for bf16 on a GPU, and load 16 bytes at a time."""
    return x.is_cuda and x.dtype == torch.bfloat16 and down_EWF.shape[1] % 8 == down_EWF.shape[2] % 8 == 0


def grouped_experts(x_NW: Tensor, gate_up: Tensor, down: Tensor, index_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """The weighted sum over each token's experts: gate_up `E 2F W`, down `E W F`."""
    y: Tensor = _forward(x_NW, gate_up, down, index_NK, weight_NK)[0]
    return y


def gather_sum(rows_SW: Tensor, places_NK: Tensor) -> Tensor:
    """For each n the sum over k of rows[places[n, k]], in float32."""
    if rows_SW.is_cuda:
        from lakh.workloads.code.kernels import triton_experts

        return triton_experts.gather_sum(rows_SW, places_NK)
    return rows_SW[places_NK].float().sum(1).to(rows_SW.dtype)


def weighted_swiglu(gate_up_S2F: Tensor, weight_S: Tensor, order_S: Tensor) -> Tensor:
    """silu(gate) * up * weight[order], row by row."""
    if gate_up_S2F.is_cuda:
        from lakh.workloads.code.kernels import triton_experts

        return triton_experts.weighted_swiglu(gate_up_S2F, weight_S, order_S)
    gate, up = gate_up_S2F.float().chunk(2, dim=-1)
    return (F.silu(gate) * up * weight_S[order_S, None]).to(gate_up_S2F.dtype)


def weighted_swiglu_backward(
    grad_SF: Tensor, gate_up_S2F: Tensor, weight_S: Tensor, order_S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate_up and of weight, and the output of `weighted_swiglu` again."""
    if grad_SF.is_cuda:
        from lakh.workloads.code.kernels import triton_experts

        return triton_experts.weighted_swiglu_backward(grad_SF, gate_up_S2F, weight_S, order_S)
    gate, up = gate_up_S2F.float().chunk(2, dim=-1)
    grad, weight = grad_SF.float(), weight_S[order_S, None]
    is_open = torch.sigmoid(gate)
    plain = gate * is_open * up
    grad_weight = torch.empty_like(weight_S)
    grad_weight[order_S] = (grad * plain).sum(-1).to(weight_S.dtype)
    grad = grad * weight
    both = torch.cat((grad * up * is_open * (1 + gate * (1 - is_open)), grad * gate * is_open), dim=-1)
    return both.to(gate_up_S2F.dtype), grad_weight, (plain * weight).to(gate_up_S2F.dtype)


@torch.library.custom_op("lakh::grouped_experts", mutates_args=())
def _forward(
    x_NW: Tensor, gate_up: Tensor, down: Tensor, index_NK: Tensor, weight_NK: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, and for the backward pass: the gate-up product, order, places and ends of the experts' rows."""
    top_k = index_NK.shape[1]
    experts_S, order_S = index_NK.flatten().to(torch.int16).sort(stable=True)
    # Number of rows up to the last one of each expert.
    numbers_E = torch.arange(len(gate_up), dtype=torch.int16, device=x_NW.device)
    ends_E = torch.searchsorted(experts_S, numbers_E, right=True, out_int32=True)
    places_NK = torch.empty_like(order_S)
    places_NK[order_S] = torch.arange(len(order_S), device=x_NW.device)
    places_NK = places_NK.view(-1, top_k)
    rows_SW = gather_sum(x_NW, order_S[:, None] // top_k)
    product = torch._grouped_mm(rows_SW, gate_up.mT, offs=ends_E)
    inner = weighted_swiglu(product, weight_NK.flatten(), order_S)
    y = gather_sum(torch._grouped_mm(inner, down.mT, offs=ends_E), places_NK)
    return y, product, order_S, places_NK, ends_E


@_forward.register_fake
def _(x_NW: Tensor, gate_up: Tensor, down: Tensor, index_NK: Tensor, weight_NK: Tensor) -> Any:
    rows = index_NK.numel()
    return (
        x_NW.new_empty(x_NW.shape),
        x_NW.new_empty(rows, gate_up.shape[1]),
        index_NK.new_empty(rows, dtype=torch.int64),
        index_NK.new_empty(index_NK.shape, dtype=torch.int64),
        index_NK.new_empty(len(gate_up), dtype=torch.int32),
    )


@torch.library.custom_op("lakh::grouped_experts_backward", mutates_args=())
def _backward(
    grad_NW: Tensor,
    x_NW: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weight_NK: Tensor,
    product: Tensor,
    order_S: Tensor,
    places_NK: Tensor,
    ends_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = order_S[:, None] // places_NK.shape[1]
    grad_SW = gather_sum(grad_NW.contiguous(), rows)
    grad_inner = torch._grouped_mm(grad_SW, down, offs=ends_E)
    grad_product, grad_weight, inner = weighted_swiglu_backward(grad_inner, product, weight_NK.flatten(), order_S)
    grad_down = torch._grouped_mm(grad_SW.mT, inner, offs=ends_E)
    grad_gate_up = torch._grouped_mm(grad_product.mT, gather_sum(x_NW, rows), offs=ends_E)
    grad_x = gather_sum(torch._grouped_mm(grad_product, gate_up, offs=ends_E), places_NK)
    return grad_x, grad_gate_up, grad_down, grad_weight.view_as(weight_NK)


@_backward.register_fake
def _(
    grad_NW: Tensor, x_NW: Tensor, gate_up: Tensor, down: Tensor, weight_NK: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x_NW.new_empty(x_NW.shape), torch.empty_like(gate_up), torch.empty_like(down), torch.empty_like(weight_NK)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, gate_up, down, _, weight = inputs
    ctx.save_for_backward(x, gate_up, down, weight, *output[1:])
    ctx.set_materialize_grads(False)  # of the product, which has no gradient of its own


def _gradient(ctx: Any, grad_y: Tensor, *_: Any) -> Any:
    grad_x, grad_gate_up, grad_down, grad_weight = _backward(grad_y, *ctx.saved_tensors)
    return grad_x, grad_gate_up, grad_down, None, grad_weight


_forward.register_autograd(_gradient, setup_context=_setup)
