"""Triton kernels for quantized weights: tokens rounded to e4m3, weights of 4 bits dequantized, and a few tokens times
weights of 4 bits.

Shapes: N tokens, K columns, R rows of the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["dequantize_int4", "multiply_int4", "round_tokens"]

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _round_token(x, rounded, scales, K, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    values = tl.load(x + n * K + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / FP8_MAX
    tl.store(rounded + n * K + k, (values / scale).to(rounded.dtype.element_ty), mask=k < K)
    tl.store(scales + n, scale)


def round_tokens(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Each token in e4m3, and its scale."""
    num, columns = x_NK.shape
    rounded = torch.empty(x_NK.shape, dtype=torch.float8_e4m3fn, device=x_NK.device)
    scales = torch.empty(num, device=x_NK.device)
    block = 1 << (columns - 1).bit_length()
    _round_token[(num,)](x_NK, rounded, scales, columns, BLOCK=block, num_warps=4 if block <= 4096 else 8)
    return rounded, scales


@triton.jit
def _int4_tile(words, scales, at_row, k, inside, row_words, row_halves, K):
    """Numbers of some columns k of some rows, as float32: rows x columns."""
    packed = tl.load(words + at_row * row_words + (k // 8)[None, :], mask=inside, other=0)
    scale = tl.load(scales + at_row * row_halves + (K // 4 + k // 32)[None, :], mask=inside, other=0.0)
    shift = (k % 8) // 2 * 4 + k % 2 * 16
    return (((packed >> shift[None, :]) & 15) - 8).to(tl.float32) * scale.to(tl.float32)


@triton.jit
def _int4_numbers(words, scales, out, R, K, row_words, row_halves, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (r < R)[:, None] & (k < K)[None, :]
    at_row = r.to(tl.int64)[:, None]
    numbers = _int4_tile(words, scales, at_row, k, inside, row_words, row_halves, K)
    tl.store(out + at_row * K + k[None, :], numbers.to(out.dtype.element_ty), mask=inside)


def dequantize_int4(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The numbers of quantized.Int4Matrix."""
    rows, size = packed.shape
    out = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    _int4_numbers[(-(-rows // 8), -(-columns // 512))](
        packed.view(torch.int32), packed.view(torch.float16), out, rows, columns, size // 4, size // 2,
        BLOCK_R=8, BLOCK_K=512, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _int4_product(
    x, words, scales, y, N, R, W, row_words, row_halves,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """y N R = x N K times dequantized rows. `words` and `scales` are the same memory, as int32 and as float16.

    A row has W = K / 8 words. x is 8 N W: the columns that a shift of a word gives are contiguous, so each word is read
    once.
    """
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_W)
    is_row, is_token = r < R, n < N
    at_row = r.to(tl.int64)[:, None]
    total = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for first in range(0, W, BLOCK_W):
        word = first + j
        inside = is_row[:, None] & (word[None, :] < W)
        packed = tl.load(words + at_row * row_words + word[None, :], mask=inside, other=0)
        scale = tl.load(scales + at_row * row_halves + (2 * W + word // 4)[None, :], mask=inside, other=0.0)
        scale = scale.to(tl.float32)
        is_column = (word[:, None] < W) & is_token[None, :]
        for i in tl.static_range(8):
            numbers = (((packed >> (i // 2 * 4 + i % 2 * 16)) & 15) - 8).to(tl.float32) * scale
            tokens = tl.load(x + (i * N + n[None, :]) * W + word[:, None], mask=is_column, other=0.0)
            total = tl.dot(numbers.to(tokens.dtype), tokens, total)
    at = n[None, :] * R + r[:, None]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=is_token[None, :] & is_row[:, None])


def multiply_int4(x_NK: Tensor, packed: Tensor, columns: int) -> Tensor:
    """x times rows of quantized.Int4Matrix."""
    num, rows = len(x_NK), len(packed)
    y = torch.empty(num, rows, dtype=x_NK.dtype, device=x_NK.device)
    by_shift = x_NK.view(num, -1, 8).permute(2, 0, 1).contiguous()
    block_n = min(max(1 << (num - 1).bit_length(), 16), 64)
    block_r = 32 if rows >= 4096 else 16  # at least as many programs as SMs
    size = packed.shape[1]
    _int4_product[(-(-rows // block_r), -(-num // block_n))](
        by_shift, packed.view(torch.int32), packed.view(torch.float16), y, num, rows, columns // 8, size // 4,
        size // 2, BLOCK_N=block_n, BLOCK_R=block_r, BLOCK_W=32, num_warps=4, num_stages=3,
    )  # fmt: skip
    return y
