"""Triton kernels of grouped experts, each one pass over its data. Import only where a GPU is used.

The plain forms and the shapes are in experts.py; tests/gpu compares them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gather_sum", "weighted_swiglu", "weighted_swiglu_backward"]

_COLUMNS = 1024


@triton.jit
def _gather_sum(rows, places, y, W, K: tl.constexpr, COLUMNS: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < W
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places + n * K + k).to(tl.int64)
        total += tl.load(rows + place * W + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + n * W + at, total, mask=inside)


def gather_sum(rows_SW: Tensor, places_NK: Tensor) -> Tensor:
    """For each n the sum over k of rows[places[n, k]]."""
    rows_SW, (num, top_k), width = rows_SW.contiguous(), places_NK.shape, rows_SW.shape[1]
    y = rows_SW.new_empty(num, width)
    columns = min(2048, triton.next_power_of_2(width))
    grid = (num, triton.cdiv(width, columns))
    _gather_sum[grid](rows_SW, places_NK.contiguous(), y, width, K=top_k, COLUMNS=columns)
    return y


@triton.jit
def _weighted_swiglu(product, weight, order, inner, F, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < F
    factor = tl.load(weight + tl.load(order + row)).to(tl.float32)
    gate = tl.load(product + row * 2 * F + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(product + row * 2 * F + F + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(inner + row * F + at, gate * tl.sigmoid(gate) * up * factor, mask=inside)


def weighted_swiglu(gate_up_S2F: Tensor, weight_S: Tensor, order_S: Tensor) -> Tensor:
    num, size = gate_up_S2F.shape[0], gate_up_S2F.shape[1] // 2
    inner = gate_up_S2F.new_empty(num, size)
    grid = (num, triton.cdiv(size, _COLUMNS))
    _weighted_swiglu[grid](gate_up_S2F.contiguous(), weight_S.contiguous(), order_S, inner, size, COLUMNS=_COLUMNS)
    return inner


@triton.jit
def _weighted_swiglu_backward(
    grad_inner, product, weight, order, grad_product, grad_weight, inner, F, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(order + row)
    factor = tl.load(weight + source).to(tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, F, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        inside = at < F
        grad = tl.load(grad_inner + row * F + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(product + row * 2 * F + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(product + row * 2 * F + F + at, mask=inside, other=0.0).to(tl.float32)
        is_open = tl.sigmoid(gate)
        plain = gate * is_open * up
        total += grad * plain
        grad *= factor
        tl.store(inner + row * F + at, plain * factor, mask=inside)
        tl.store(grad_product + row * 2 * F + at, grad * up * is_open * (1 + gate * (1 - is_open)), mask=inside)
        tl.store(grad_product + row * 2 * F + F + at, grad * gate * is_open, mask=inside)
    tl.store(grad_weight + source, tl.sum(total, 0))


def weighted_swiglu_backward(
    grad_SF: Tensor, gate_up_S2F: Tensor, weight_S: Tensor, order_S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    num, size = grad_SF.shape
    grad_product, inner = torch.empty_like(gate_up_S2F), torch.empty_like(grad_SF)
    grad_weight = torch.empty_like(weight_S)
    _weighted_swiglu_backward[(num,)](
        grad_SF.contiguous(), gate_up_S2F, weight_S.contiguous(), order_S, grad_product, grad_weight, inner, size,
        COLUMNS=_COLUMNS,
    )  # fmt: skip
    return grad_product, grad_weight, inner
