"""Triton kernels that round operands to 8-bit floats on NVIDIA GPUs.

    largest                the largest magnitude of a tensor, at the speed of memory
    round_both             a tensor in 8 bits, as it is and transposed, from one read: products with 8-bit operands need
                           both layouts, one in the forward and one in the backward pass
    measured_swiglu        silu(gate) * up, and the largest magnitude of the result; its backward pass likewise

Import only where a GPU is used. tensorwise.py uses them; tests/gpu compares them with plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["largest", "measured_swiglu", "measured_swiglu_backward", "round_both"]

_PROGRAMS = 1056  # eight for each multiprocessor of an H100 or H200
_BLOCK = 8192  # numbers that a program reads at a time
_ROUND = {"ROWS": 64, "COLUMNS": 256, "num_warps": 8}
_GATED = {"ROWS": 8, "COLUMNS": 512, "num_warps": 4}
_SMALLEST = 1e-12  # a tensor of zeros has a scale, too


@triton.jit
def _largest(x, found, SIZE, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    top = tl.zeros((BLOCK,), tl.float32)
    for turn in range(TURNS):
        at = (turn * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.abs(tl.load(x + at, mask=at < SIZE, other=0.0).to(tl.float32)))
    tl.atomic_max(found, tl.max(top, 0))


@torch.library.custom_op("lakh::largest", mutates_args=())
def largest(x: Tensor) -> Tensor:
    """The largest magnitude, in float32. A maximum does not depend on the order of its parts."""
    x = x.contiguous()
    found = torch.zeros((), dtype=torch.float32, device=x.device)
    programs = min(_PROGRAMS, triton.cdiv(x.numel(), _BLOCK))
    turns = triton.cdiv(x.numel(), programs * _BLOCK)
    _largest[(programs,)](x, found, x.numel(), TURNS=turns, BLOCK=_BLOCK, num_warps=8)
    return found


@largest.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@triton.jit
def _round_both(
    x, found, y, y_t, scale, N, K, LIMIT, SMALLEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    factor = LIMIT / tl.maximum(tl.load(found), SMALLEST)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, 1.0 / factor)
    inside = (row[:, None] < N) & (at[None, :] < K)
    place = row[:, None].to(tl.int64) * K + at[None, :]
    rounded = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * factor).to(y.dtype.element_ty)
    tl.store(y + place, rounded, mask=inside)
    place = at[:, None].to(tl.int64) * N + row[None, :]
    tl.store(y_t + place, tl.trans(rounded), mask=(row[None, :] < N) & (at[:, None] < K))


@torch.library.custom_op("lakh::round_both", mutates_args=())
def round_both(x_NK: Tensor, found: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x in 8 bits, its transpose in 8 bits, and the factor that gives back x; `found` is x's largest magnitude."""
    x_NK = x_NK.contiguous()
    N, K = x_NK.shape
    y, y_t = x_NK.new_empty(N, K, dtype=dtype), x_NK.new_empty(K, N, dtype=dtype)
    scale = torch.empty_like(found)
    grid = (triton.cdiv(N, _ROUND["ROWS"]), triton.cdiv(K, _ROUND["COLUMNS"]))
    limit = torch.finfo(dtype).max
    _round_both[grid](x_NK, found, y, y_t, scale, N, K, limit, SMALLEST=_SMALLEST, **_ROUND)
    return y, y_t, scale


@round_both.register_fake
def _(x_NK: Tensor, found: Tensor, dtype: torch.dtype) -> Any:
    N, K = x_NK.shape
    return x_NK.new_empty(N, K, dtype=dtype), x_NK.new_empty(K, N, dtype=dtype), found.new_empty(())


@triton.jit
def _gated(grad, x, y, found, N, F, BACK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < N) & (at < F)
    place = row.to(tl.int64) * 2 * F + at
    gate = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + place + F, mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gate)
    if BACK:
        g = tl.load(grad + row.to(tl.int64) * F + at, mask=inside, other=0.0).to(tl.float32)
        left = (g * up * open_ * (1 + gate * (1 - open_))).to(y.dtype.element_ty)
        right = (g * gate * open_).to(y.dtype.element_ty)
        tl.store(y + place, left, mask=inside)
        tl.store(y + place + F, right, mask=inside)
        top = tl.maximum(tl.abs(left.to(tl.float32)), tl.abs(right.to(tl.float32)))
    else:
        result = (gate * open_ * up).to(y.dtype.element_ty)
        tl.store(y + row.to(tl.int64) * F + at, result, mask=inside)
        top = tl.abs(result.to(tl.float32))
    tl.atomic_max(found, tl.max(tl.max(top, 1), 0))


def _launch_gated(grad: Tensor, x: Tensor, y: Tensor, back: bool) -> Tensor:
    N, F = x.shape[0], x.shape[1] // 2
    found = torch.zeros((), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(N, _GATED["ROWS"]), triton.cdiv(F, _GATED["COLUMNS"]))
    _gated[grid](grad, x, y, found, N, F, BACK=back, **_GATED)
    return found


@torch.library.custom_op("lakh::measured_swiglu", mutates_args=())
def measured_swiglu(x_NF2: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up, where x holds gate and up side by side; and its largest magnitude."""
    y = x_NF2.new_empty(x_NF2.shape[0], x_NF2.shape[1] // 2)
    return y, _launch_gated(y, x_NF2, y, back=False)


@measured_swiglu.register_fake
def _(x_NF2: Tensor) -> tuple[Tensor, Tensor]:
    return x_NF2.new_empty(x_NF2.shape[0], x_NF2.shape[1] // 2), x_NF2.new_empty((), dtype=torch.float32)


@torch.library.custom_op("lakh::measured_swiglu_backward", mutates_args=())
def measured_swiglu_backward(grad_NF: Tensor, x_NF2: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gate and up side by side; and its largest magnitude."""
    grad_x = torch.empty_like(x_NF2)
    return grad_x, _launch_gated(grad_NF, x_NF2, grad_x, back=True)


@measured_swiglu_backward.register_fake
def _(grad_NF: Tensor, x_NF2: Tensor) -> tuple[Tensor, Tensor]:
    return x_NF2.new_empty(x_NF2.shape), x_NF2.new_empty((), dtype=torch.float32)
