"""Triton kernels for 8-bit operands with a scale for each row, on NVIDIA GPUs.

    largest_of_rows     the largest magnitude of each row
    largest_of_both     the largest magnitude of each row and of each column
    round_both_axes     a weight in 8 bits by its rows' scales, and its transpose by its columns', each in its own type
    round_gradient      a gradient in 8 bits by its rows' scales, and its transpose times the scales of another operand
    rounded_swiglu_backward     the gradient of silu(gate) * up, rounded as `round_gradient` does

The sum over tokens that makes a weight's gradient has two operands whose scales differ from token to token. The one of
the forward pass is kept with its scales left out; they are multiplied into the gradient before that is rounded.

Import only where a GPU is used. rowwise.py uses them; tests/gpu compares them with plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "as_8_bits",
    "largest_number",
    "largest_of_both",
    "largest_of_rows",
    "round_both_axes",
    "round_gradient",
    "rounded_swiglu_backward",
]

_SEARCH = {"ROWS": 4, "COLUMNS": 2048, "num_warps": 8}
_SEARCH_BOTH = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4}
_ROUND = {"ROWS": 64, "COLUMNS": 256, "num_warps": 8}
_GATED_BACKWARD = {"ROWS": 32, "COLUMNS": 128, "num_warps": 8}
_SMALLEST = 1e-30  # a row of zeros has a scale, too


def largest_number(dtype: torch.dtype) -> float:
    """Of an 8-bit type; integers are symmetric."""
    return torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max


@triton.jit
def as_8_bits(value, dtype: tl.constexpr):
    """Scaled numbers to the nearest ones of an 8-bit type; a conversion to an integer alone would truncate."""
    if dtype == tl.int8:
        value = tl.floor(value + 0.5)
    return value.to(dtype)


@triton.jit
def _largest_of_rows(x, rows, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    top = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, K, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        inside = (row[:, None] < N) & (at[None, :] < K)
        part = tl.load(x + row[:, None].to(tl.int64) * K + at[None, :], mask=inside, other=0.0)
        top = tl.maximum(top, tl.abs(part.to(tl.float32)))
    tl.store(rows + row, tl.max(top, 1), mask=row < N)


@torch.library.custom_op("lakh::largest_of_rows", mutates_args=())
def largest_of_rows(x_NK: Tensor) -> Tensor:
    """The largest magnitude of each row, N, in float32."""
    x_NK = x_NK.contiguous()
    N, K = x_NK.shape
    rows = torch.empty(N, dtype=torch.float32, device=x_NK.device)
    _largest_of_rows[(triton.cdiv(N, _SEARCH["ROWS"]),)](x_NK, rows, N, K, **_SEARCH)
    return rows


@largest_of_rows.register_fake
def _(x_NK: Tensor) -> Tensor:
    return x_NK.new_empty(x_NK.shape[0], dtype=torch.float32)


@triton.jit
def _largest_of_both(x, rows, columns, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < N) & (at[None, :] < K)
    part = tl.load(x + row[:, None].to(tl.int64) * K + at[None, :], mask=inside, other=0.0)
    size = tl.abs(part.to(tl.float32))
    tl.atomic_max(rows + row, tl.max(size, 1), mask=row < N)
    tl.atomic_max(columns + at, tl.max(size, 0), mask=at < K)


@torch.library.custom_op("lakh::largest_of_both", mutates_args=())
def largest_of_both(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitudes of each row, N, and of each column, K, in float32."""
    x_NK = x_NK.contiguous()
    N, K = x_NK.shape
    rows, columns = (torch.zeros(size, dtype=torch.float32, device=x_NK.device) for size in (N, K))
    grid = (triton.cdiv(N, _SEARCH_BOTH["ROWS"]), triton.cdiv(K, _SEARCH_BOTH["COLUMNS"]))
    _largest_of_both[grid](x_NK, rows, columns, N, K, **_SEARCH_BOTH)
    return rows, columns


@largest_of_both.register_fake
def _(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    N, K = x_NK.shape
    return x_NK.new_empty(N, dtype=torch.float32), x_NK.new_empty(K, dtype=torch.float32)


# --- rounding ---------------------------------------------------------------------------------------------------------


@triton.jit
def _round(
    x, rows, columns, other, top, y, y_t, scale, scale_t, N, K, LIMIT, LIMIT_T,
    BY_COLUMNS: tl.constexpr, FOLDS: tl.constexpr, SMALLEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < N) & (at[None, :] < K)
    place = row[:, None].to(tl.int64) * K + at[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.load(rows + row, mask=row < N, other=1.0), SMALLEST)
    rounded = as_8_bits(value * (LIMIT / largest)[:, None], y.dtype.element_ty)
    tl.store(y + place, rounded, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(scale + row, largest / LIMIT, mask=row < N)
    if BY_COLUMNS:
        largest = tl.maximum(tl.load(columns + at, mask=at < K, other=1.0), SMALLEST)
        rounded = as_8_bits(value * (LIMIT_T / largest)[None, :], y_t.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(scale_t + at, largest / LIMIT_T, mask=at < K)
    if FOLDS:
        whole = tl.maximum(tl.load(top), SMALLEST)
        factor = tl.load(other + row, mask=row < N, other=0.0) * (LIMIT_T / whole)
        rounded = as_8_bits(value * factor[:, None], y_t.dtype.element_ty)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale_t, whole / LIMIT_T)
    place = at[:, None].to(tl.int64) * N + row[None, :]
    tl.store(y_t + place, tl.trans(rounded), mask=(row[None, :] < N) & (at[:, None] < K))


def _launch_round(
    x_NK: Tensor,
    rows: Tensor,
    dtype: torch.dtype,
    dtype_t: torch.dtype,
    *,
    columns: Tensor | None = None,
    fold: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x_NK = x_NK.contiguous()
    N, K = x_NK.shape
    y, y_t = x_NK.new_empty(N, K, dtype=dtype), x_NK.new_empty(K, N, dtype=dtype_t)
    scale = rows.new_empty(N, 1)
    scale_t = rows.new_empty(()) if columns is None else rows.new_empty(K, 1)
    other, top = (rows, rows) if fold is None else fold
    grid = (triton.cdiv(N, _ROUND["ROWS"]), triton.cdiv(K, _ROUND["COLUMNS"]))
    _round[grid](
        x_NK, rows, rows if columns is None else columns, other, top, y, y_t, scale, scale_t, N, K,
        largest_number(dtype), largest_number(dtype_t),
        BY_COLUMNS=columns is not None, FOLDS=fold is not None, SMALLEST=_SMALLEST, **_ROUND,
    )  # fmt: skip
    return y, y_t, scale, scale_t


@torch.library.custom_op("lakh::round_both_axes", mutates_args=())
def round_both_axes(
    x_NK: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype, dtype_t: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x in `dtype` by rows, its transpose in `dtype_t` by columns of x, and the factors N 1 and K 1 that give back
    both."""
    return _launch_round(x_NK, rows, dtype, dtype_t, columns=columns)


@round_both_axes.register_fake
def _(x_NK: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype, dtype_t: torch.dtype) -> Any:
    N, K = x_NK.shape
    sides = x_NK.new_empty(N, K, dtype=dtype), x_NK.new_empty(K, N, dtype=dtype_t)
    return *sides, rows.new_empty(N, 1), rows.new_empty(K, 1)


@torch.library.custom_op("lakh::round_gradient", mutates_args=())
def round_gradient(
    grad_NM: Tensor, rows: Tensor, other: Tensor, top: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient in 8 bits by rows with the factors N 1 that give it back, and the transpose of its product with
    `other` N 1 with the one factor that gives that back; `top` is the largest magnitude of the product."""
    y, y_t, scale, scale_t = _launch_round(grad_NM, rows, dtype, dtype, fold=(other, top))
    return y, y_t, scale, scale_t


@round_gradient.register_fake
def _(grad_NM: Tensor, rows: Tensor, other: Tensor, top: Tensor, dtype: torch.dtype) -> Any:
    N, M = grad_NM.shape
    sides = grad_NM.new_empty(N, M, dtype=dtype), grad_NM.new_empty(M, N, dtype=dtype)
    return *sides, rows.new_empty(N, 1), rows.new_empty(())


# --- swiglu: x_NF2 holds gate and up side by side ---------------------------------------------------------------------


@triton.jit
def _store_both(y, y_t, value, factor, factor_t, row, at, N, SIZE, inside):
    dtype: tl.constexpr = y.dtype.element_ty
    tl.store(y + row[:, None].to(tl.int64) * SIZE + at[None, :], (value * factor[:, None]).to(dtype), mask=inside)
    place = at[:, None].to(tl.int64) * N + row[None, :]
    tl.store(y_t + place, tl.trans((value * factor_t[:, None]).to(dtype)), mask=tl.trans(inside))


@triton.jit
def _gated_backward(
    grad, x, bounds, other, top, y, y_t, scale, scale_t, N, F, LIMIT,
    SMALLEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < N) & (at[None, :] < F)
    place = row[:, None].to(tl.int64) * 2 * F + at[None, :]
    gate = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + place + F, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row[:, None].to(tl.int64) * F + at[None, :], mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gate)
    bound = tl.maximum(tl.load(bounds + row, mask=row < N, other=1.0), SMALLEST)
    whole = tl.maximum(tl.load(top), SMALLEST)
    factor = LIMIT / bound
    factor_t = tl.load(other + row, mask=row < N, other=0.0) * (LIMIT / whole)
    if tl.program_id(1) == 0:
        tl.store(scale + row, bound / LIMIT, mask=row < N)
        if tl.program_id(0) == 0:
            tl.store(scale_t, whole / LIMIT)
    left = g * up * open_ * (1 + gate * (1 - open_))
    _store_both(y, y_t, left, factor, factor_t, row, at, N, 2 * F, inside)
    _store_both(y, y_t, g * gate * open_, factor, factor_t, row, F + at, N, 2 * F, inside)


@torch.library.custom_op("lakh::rounded_swiglu_backward", mutates_args=())
def rounded_swiglu_backward(
    grad_NF: Tensor, x_NF2: Tensor, bounds: Tensor, other: Tensor, top: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of gate and up side by side, rounded as `round_gradient` does. `bounds`, of each row, and `top`, of
    the product with `other`, are at least the largest magnitude; they may be larger by much less than the range of the
    8-bit type."""
    grad_NF = grad_NF.contiguous()
    N, F = grad_NF.shape
    y, y_t = x_NF2.new_empty(N, 2 * F, dtype=dtype), x_NF2.new_empty(2 * F, N, dtype=dtype)
    scale, scale_t = bounds.new_empty(N, 1), bounds.new_empty(())
    grid = (triton.cdiv(N, _GATED_BACKWARD["ROWS"]), triton.cdiv(F, _GATED_BACKWARD["COLUMNS"]))
    _gated_backward[grid](
        grad_NF, x_NF2, bounds, other, top, y, y_t, scale, scale_t, N, F, torch.finfo(dtype).max,
        SMALLEST=_SMALLEST, **_GATED_BACKWARD,
    )  # fmt: skip
    return y, y_t, scale, scale_t


@rounded_swiglu_backward.register_fake
def _(grad_NF: Tensor, x_NF2: Tensor, bounds: Tensor, other: Tensor, top: Tensor, dtype: torch.dtype) -> Any:
    N, F2 = x_NF2.shape
    sides = x_NF2.new_empty(N, F2, dtype=dtype), x_NF2.new_empty(F2, N, dtype=dtype)
    return *sides, bounds.new_empty(N, 1), bounds.new_empty(())
