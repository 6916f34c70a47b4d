"""A Triton kernel that rounds operands to 8-bit floats with a scale for each 128 numbers of a row, on NVIDIA GPUs: one
read for both layouts and their scales.

Import only where a GPU is used. blockwise.py uses it; tests/gpu compares it with plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["round_blocks"]

_BLOCK = 128
_SMALLEST = 1e-30  # a block of zeros has a scale, too


@triton.jit
def _round_blocks(x, y, y_t, scale, scale_t, N, K, LIMIT, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    down, across = tl.program_id(0), tl.program_id(1)
    row = down * BLOCK + tl.arange(0, BLOCK)
    at = across * BLOCK + tl.arange(0, BLOCK)
    place = row[:, None].to(tl.int64) * K + at[None, :]
    value = tl.load(x + place).to(tl.float32)
    rows = tl.maximum(tl.max(tl.abs(value), 1), SMALLEST)
    tl.store(y + place, (value * (LIMIT / rows)[:, None]).to(y.dtype.element_ty))
    tl.store(scale + across * N + row, rows / LIMIT)
    columns = tl.maximum(tl.max(tl.abs(value), 0), SMALLEST)
    rounded = (value * (LIMIT / columns)[None, :]).to(y.dtype.element_ty)
    tl.store(y_t + at[:, None].to(tl.int64) * N + row[None, :], tl.trans(rounded))
    tl.store(scale_t + down * K + at, columns / LIMIT)


@torch.library.custom_op("lakh::round_blocks", mutates_args=())
def _launch(x_NK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x_NK = x_NK.contiguous()
    N, K = x_NK.shape
    y, y_t = x_NK.new_empty(N, K, dtype=dtype), x_NK.new_empty(K, N, dtype=dtype)
    scale = x_NK.new_empty(K // _BLOCK, N, dtype=torch.float32)
    scale_t = x_NK.new_empty(N // _BLOCK, K, dtype=torch.float32)
    limit = torch.finfo(dtype).max
    _round_blocks[(N // _BLOCK, K // _BLOCK)](
        x_NK, y, y_t, scale, scale_t, N, K, limit, SMALLEST=_SMALLEST, BLOCK=_BLOCK, num_warps=8
    )
    return y, y_t, scale, scale_t


@_launch.register_fake
def _(x_NK: Tensor, dtype: torch.dtype) -> Any:
    N, K = x_NK.shape
    sides = x_NK.new_empty(N, K, dtype=dtype), x_NK.new_empty(K, N, dtype=dtype)
    scales = (x_NK.new_empty(size, dtype=torch.float32) for size in ((K // _BLOCK, N), (N // _BLOCK, K)))
    return *sides, *scales


def round_blocks(x_NK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and its transpose in 8 bits, and the factors that give back each of them: N x K/128, and K x N/128, column by
    column, as cuBLAS reads them. Both sizes are multiples of 128."""
    y, y_t, scale, scale_t = _launch(x_NK, dtype)
    return y, y_t, scale.t(), scale_t.t()
