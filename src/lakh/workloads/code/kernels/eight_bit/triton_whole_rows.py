"""Triton kernels that compute a row and round it to 8 bits in one pass, on NVIDIA GPUs: a program holds whole rows, so
that it knows a row's largest magnitude before it writes it.

    round_whole_rows    a tensor in 8 bits by its rows' scales
    rounded_swiglu      silu(gate) * up in 8 bits by its rows' scales
    rounded_add_norm    a sum of two tensors, and its norm in 8 bits by its rows' scales
    transposed          a tensor of 8-bit numbers, transposed and in e4m3

What is rounded is the bf16 result that the kernels in triton.py write: to round that gives the same bits.

Import only where a GPU is used. rowwise.py uses them; tests/gpu compares them with triton.py and
triton_rowwise.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lakh.workloads.code.kernels.eight_bit.triton_rowwise import as_8_bits, largest_number

__all__ = ["round_whole_rows", "rounded_add_norm", "rounded_swiglu", "transposed"]

_TRANSPOSE = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4}
_LANES = 32
"""Numbers of a row that a thread holds."""
_E4M3 = torch.float8_e4m3fn
_SMALLEST = 1e-30  # a row of zeros has a scale, too


def _warps(columns: int) -> int:
    return max(1, min(16, columns // (32 * _LANES)))


@triton.jit
def _store_rounded(y, scale, row, at, inside, K, value, LIMIT, SMALLEST: tl.constexpr):
    """`value` is a row in float32 whose numbers are bf16."""
    largest = tl.maximum(tl.max(tl.abs(value), 0), SMALLEST)
    tl.store(y + row * K + at, as_8_bits(value * (LIMIT / largest), y.dtype.element_ty), mask=inside)
    tl.store(scale + row, largest / LIMIT)


@triton.jit
def _round_whole_rows(x, y, scale, K, LIMIT, SMALLEST: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, COLUMNS)
    value = tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)
    _store_rounded(y, scale, row, at, at < K, K, value, LIMIT, SMALLEST)


@torch.library.custom_op("lakh::round_whole_rows", mutates_args=())
def round_whole_rows(x_NK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in 8 bits, and the factors N 1 that give it back."""
    x_NK = x_NK.contiguous()
    N, K = x_NK.shape
    y, scale = x_NK.new_empty(N, K, dtype=dtype), x_NK.new_empty(N, 1, dtype=torch.float32)
    columns = triton.next_power_of_2(K)
    _round_whole_rows[(N,)](
        x_NK, y, scale, K, largest_number(dtype), SMALLEST=_SMALLEST, COLUMNS=columns, num_warps=_warps(columns)
    )
    return y, scale


@round_whole_rows.register_fake
def _(x_NK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    N, K = x_NK.shape
    return x_NK.new_empty(N, K, dtype=dtype), x_NK.new_empty(N, 1, dtype=torch.float32)


@triton.jit
def _transposed(x, y, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < N) & (at[None, :] < K)
    part = tl.load(x + row[:, None].to(tl.int64) * K + at[None, :], mask=inside, other=0)
    if x.dtype.element_ty == tl.int8:  # e4m3 comes as bytes
        part = part.to(tl.float32).to(y.dtype.element_ty)
    place = at[:, None].to(tl.int64) * N + row[None, :]
    tl.store(y + place, tl.trans(part), mask=(row[None, :] < N) & (at[:, None] < K))


@torch.library.custom_op("lakh::transposed_bytes", mutates_args=())
def transposed(x_NK: Tensor) -> Tensor:
    """Of numbers in e4m3 or int8, in e4m3: integers above 16 are rounded to 4 bits."""
    N, K = x_NK.shape
    y_KN = x_NK.new_empty(K, N, dtype=_E4M3)
    grid = (triton.cdiv(N, _TRANSPOSE["ROWS"]), triton.cdiv(K, _TRANSPOSE["COLUMNS"]))
    sides = (x_NK, y_KN) if x_NK.dtype == torch.int8 else (x_NK.view(torch.uint8), y_KN.view(torch.uint8))
    _transposed[grid](*sides, N, K, **_TRANSPOSE)
    return y_KN


@transposed.register_fake
def _(x_NK: Tensor) -> Tensor:
    return x_NK.new_empty(x_NK.shape[1], x_NK.shape[0], dtype=_E4M3)


# --- swiglu: x_NF2 holds gate and up side by side ---------------------------------------------------------------------


@triton.jit
def _rounded_swiglu(x, y, scale, inputs, F, LIMIT, SMALLEST: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, COLUMNS)
    gate = tl.load(x + row * 2 * F + at, mask=at < F, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + at, mask=at < F, other=0.0).to(tl.float32)
    silu = gate * tl.sigmoid(gate)
    tl.store(inputs + row, tl.max(tl.maximum(tl.abs(silu), tl.abs(up)), 0))
    result = (silu * up).to(x.dtype.element_ty).to(tl.float32)
    _store_rounded(y, scale, row, at, at < F, F, result, LIMIT, SMALLEST)


@torch.library.custom_op("lakh::rounded_swiglu", mutates_args=())
def rounded_swiglu(x_NF2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up in 8 bits; the factors N 1 that give it back; and the largest magnitude of silu(gate) and up of
    each row, for the backward pass."""
    N, F = x_NF2.shape[0], x_NF2.shape[1] // 2
    y = x_NF2.new_empty(N, F, dtype=dtype)
    scale, inputs = (x_NF2.new_empty(size, dtype=torch.float32) for size in ((N, 1), (N,)))
    columns = triton.next_power_of_2(F)
    _rounded_swiglu[(N,)](
        x_NF2, y, scale, inputs, F, largest_number(dtype),
        SMALLEST=_SMALLEST, COLUMNS=columns, num_warps=_warps(columns),
    )  # fmt: skip
    return y, scale, inputs


@rounded_swiglu.register_fake
def _(x_NF2: Tensor, dtype: torch.dtype) -> Any:
    N, F = x_NF2.shape[0], x_NF2.shape[1] // 2
    measured = (x_NF2.new_empty(size, dtype=torch.float32) for size in ((N, 1), (N,)))
    return x_NF2.new_empty(N, F, dtype=dtype), *measured


# --- add_norm ---------------------------------------------------------------------------------------------------------


@triton.jit
def _rounded_add_norm(
    x, delta, weight, total, y, scale, W, EPS, LIMIT, SMALLEST: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, COLUMNS)
    inside = at < W
    both = tl.load(x + row * W + at, mask=inside, other=0.0).to(tl.float32)
    both += tl.load(delta + row * W + at, mask=inside, other=0.0).to(tl.float32)
    rounded = both.to(total.dtype.element_ty)
    tl.store(total + row * W + at, rounded, mask=inside)
    both = rounded.to(tl.float32)
    norm = tl.rsqrt(tl.sum(both * both, 0) / W + EPS)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    value = (both * norm * w).to(total.dtype.element_ty).to(tl.float32)
    _store_rounded(y, scale, row, at, inside, W, value, LIMIT, SMALLEST)


@torch.library.custom_op("lakh::rounded_add_norm", mutates_args=())
def rounded_add_norm(
    x_NW: Tensor, delta_NW: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta; its root-mean-square norm in 8 bits; and the factors N 1 that give back the norm."""
    x_NW, delta_NW = x_NW.contiguous(), delta_NW.contiguous()
    N, W = x_NW.shape
    total, y = torch.empty_like(x_NW), x_NW.new_empty(N, W, dtype=dtype)
    scale = x_NW.new_empty(N, 1, dtype=torch.float32)
    columns = triton.next_power_of_2(W)
    _rounded_add_norm[(N,)](
        x_NW, delta_NW, weight, total, y, scale, W, eps, largest_number(dtype),
        SMALLEST=_SMALLEST, COLUMNS=columns, num_warps=max(1, min(16, columns // 256)),
    )  # fmt: skip
    return total, y, scale


@rounded_add_norm.register_fake
def _(x_NW: Tensor, delta_NW: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Any:
    N, W = x_NW.shape
    return x_NW.new_empty(N, W), x_NW.new_empty(N, W, dtype=dtype), x_NW.new_empty(N, 1, dtype=torch.float32)
