"""Triton kernels for the small matrices of low-rank adapters on NVIDIA GPUs: one launch for all adapters of a fused
matrix.

    pack                float32 adapters as the two bf16 matrices of one product
    thin_product        N x R by R x C for a small R, which writes at the speed of memory
    copy_with_product   N x K beside its product with K x R, in one read
    sums_over_tokens    the gradients of all adapters of an operation: products whose sum runs over the tokens

A step has hundreds of these matrices, and a launch takes longer than most of them.

Import only where a GPU is used. low_rank.py uses them; tests/gpu compares them with plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["MOST_ADAPTERS", "MOST_SUMS", "TokenSum", "copy_with_product", "pack", "sums_over_tokens", "thin_product"]

MOST_ADAPTERS = 3
"""That `pack` takes: queries, keys and values."""
MOST_SUMS = 7
"""That `sums_over_tokens` takes: A and B of the output matrix, A of gate and up, B of each, A and B of down."""
_PARTS = 4
"""Into which the tokens are split: the outputs are so small that they would leave most of the GPU idle."""
_SUM = {"TOKENS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 4}
_BLOCK = 2048
_THIN = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4}
_COPY = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4, "num_stages": 4}


# --- pack -------------------------------------------------------------------------------------------------------------


@triton.jit
def _pack_a(a, part, y, at, INPUTS, STRIDE, RANK: tl.constexpr):
    own = at - part * RANK * INPUTS
    inside = (own >= 0) & (own < RANK * INPUTS)
    value = tl.load(a + own, mask=inside, other=0.0).to(y.dtype.element_ty)
    tl.store(y + (at // INPUTS).to(tl.int64) * STRIDE + at % INPUTS, value, mask=inside)


@triton.jit
def _load_b(b, part, row, column, start, rows, RANK: tl.constexpr):
    own, k = row - start, column - part * RANK
    inside = (own >= 0) & (own < rows) & (k >= 0) & (k < RANK)
    return tl.load(b + own * RANK + k, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _pack(
    a0, a1, a2, b0, b1, b2, y_a, y_b, start0, start1, start2, rows0, rows1, rows2,
    INPUTS, OUTPUTS, A_STRIDE, B_STRIDE, SCALE,
    RANK: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    blocks_a = tl.cdiv(NUM * RANK * INPUTS, BLOCK)
    if tl.program_id(0) < blocks_a:
        _pack_a(a0, 0, y_a, at, INPUTS, A_STRIDE, RANK)
        if NUM > 1:
            _pack_a(a1, 1, y_a, at, INPUTS, A_STRIDE, RANK)
        if NUM > 2:
            _pack_a(a2, 2, y_a, at, INPUTS, A_STRIDE, RANK)
    else:
        at -= blocks_a * BLOCK
        row, column = at // (NUM * RANK), at % (NUM * RANK)
        value = _load_b(b0, 0, row, column, start0, rows0, RANK)
        if NUM > 1:
            value += _load_b(b1, 1, row, column, start1, rows1, RANK)
        if NUM > 2:
            value += _load_b(b2, 2, row, column, start2, rows2, RANK)
        tl.store(
            y_b + row.to(tl.int64) * B_STRIDE + column, (value * SCALE).to(y_b.dtype.element_ty), mask=row < OUTPUTS
        )


def pack(
    a: Sequence[Tensor], b: Sequence[Tensor], starts: Sequence[int], scale: float, packed_a: Tensor, packed_b: Tensor
) -> None:
    """Writes the A matrices below each other, and `scale` times the B matrices, each to its own rows (from `starts` on)
    and columns, with zeros elsewhere. Rows of the results may be apart."""
    num, (rank, inputs) = len(a), a[0].shape
    missing = MOST_ADAPTERS - num
    of_a, of_b = ([*(matrix.contiguous() for matrix in matrices), *[matrices[0]] * missing] for matrices in (a, b))
    blocks = triton.cdiv(packed_a.numel(), _BLOCK) + triton.cdiv(packed_b.numel(), _BLOCK)
    _pack[(blocks,)](
        *of_a, *of_b, packed_a, packed_b, *starts, *[0] * missing, *(len(matrix) for matrix in of_b),
        inputs, len(packed_b), packed_a.stride(0), packed_b.stride(0), scale, RANK=rank, NUM=num, BLOCK=_BLOCK,
    )  # fmt: skip


# --- thin_product -----------------------------------------------------------------------------------------------------


@triton.jit
def _thin_product(
    low, a, y, N, C, R, LOW_STRIDE, A_STRIDE, LANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, LANES)
    left_at = row[:, None].to(tl.int64) * LOW_STRIDE + k[None, :]
    left = tl.load(low + left_at, mask=(row[:, None] < N) & (k[None, :] < R), other=0.0)
    right = tl.load(a + k[:, None] * A_STRIDE + at[None, :], mask=(k[:, None] < R) & (at[None, :] < C), other=0.0)
    result = tl.dot(left, right).to(y.dtype.element_ty)
    tl.store(y + row[:, None].to(tl.int64) * C + at[None, :], result, mask=(row[:, None] < N) & (at[None, :] < C))


def thin_product(low_NR: Tensor, a_RC: Tensor) -> Tensor:
    (N, R), C = low_NR.shape, a_RC.shape[1]
    assert low_NR.stride(1) == a_RC.stride(1) == 1
    y_NC = low_NR.new_empty(N, C)
    _thin_product[(triton.cdiv(N, _THIN["ROWS"]), triton.cdiv(C, _THIN["COLUMNS"]))](
        low_NR, a_RC, y_NC, N, C, R, low_NR.stride(0), a_RC.stride(0),
        LANES=max(16, triton.next_power_of_2(R)), **_THIN,
    )  # fmt: skip
    return y_NC


# --- copy_with_product ------------------------------------------------------------------------------------------------


@triton.jit
def _copy_with_product(
    x, b, y, low, N, K, R, X_STRIDE, B_STRIDE_K, B_STRIDE_R, Y_STRIDE,
    LANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)
    x_row, y_row = x + row[:, None].to(tl.int64) * X_STRIDE, y + row[:, None].to(tl.int64) * Y_STRIDE
    total = tl.zeros((ROWS, LANES), tl.float32)
    for first in range(0, K, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        inside = (row[:, None] < N) & (at[None, :] < K)
        part = tl.load(x_row + at[None, :], mask=inside, other=0.0)
        tl.store(y_row + at[None, :], part, mask=inside)
        b_at = b + at[:, None] * B_STRIDE_K + k[None, :] * B_STRIDE_R
        total = tl.dot(part, tl.load(b_at, mask=(at[:, None] < K) & (k[None, :] < R), other=0.0), total)
    result, inside = total.to(y.dtype.element_ty), (row[:, None] < N) & (k[None, :] < R)
    tl.store(y_row + K + k[None, :], result, mask=inside)
    tl.store(low + row[:, None] * R + k[None, :], result, mask=inside)


def copy_with_product(x_NK: Tensor, b_KR: Tensor, y: Tensor) -> Tensor:
    """Writes [x | x b] to y, whose rows may be apart, and returns x b."""
    (N, K), R = x_NK.shape, b_KR.shape[1]
    assert x_NK.stride(1) == y.stride(1) == 1
    low_NR = x_NK.new_empty(N, R)
    _copy_with_product[(triton.cdiv(N, _COPY["ROWS"]),)](
        x_NK, b_KR, y, low_NR, N, K, R, x_NK.stride(0), *b_KR.stride(), y.stride(0),
        LANES=max(16, triton.next_power_of_2(R)), **_COPY,
    )  # fmt: skip
    return low_NR


# --- sums_over_tokens -------------------------------------------------------------------------------------------------


class TokenSum(NamedTuple):
    """factor * wide^T narrow, `columns of wide` x rank, or its transpose."""

    wide: Tensor
    narrow: Tensor
    factor: float = 1.0
    is_transposed: bool = False


@triton.jit
def _sum(
    job, wide, narrow, y, C, R, WIDE_STRIDE, NARROW_STRIDE, FACTOR, SIZE, N, PER_PART,
    LANES: tl.constexpr, TRANSPOSED: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, COLUMNS)
    part = job // blocks
    at, k = (job % blocks) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, LANES)
    total = tl.zeros((COLUMNS, LANES), tl.float32)
    last = tl.minimum((part + 1) * PER_PART, N)
    for first in range(part * PER_PART, last, TOKENS):
        token = first + tl.arange(0, TOKENS)
        left_at = token[:, None].to(tl.int64) * WIDE_STRIDE + at[None, :]
        left = tl.load(wide + left_at, mask=(token[:, None] < last) & (at[None, :] < C), other=0.0)
        right_at = token[:, None].to(tl.int64) * NARROW_STRIDE + k[None, :]
        right = tl.load(narrow + right_at, mask=(token[:, None] < last) & (k[None, :] < R), other=0.0)
        total = tl.dot(tl.trans(left), right, total)
    place = k[None, :] * C + at[:, None] if TRANSPOSED else at[:, None] * R + k[None, :]
    tl.store(y + part.to(tl.int64) * SIZE + place, total * FACTOR, mask=(at[:, None] < C) & (k[None, :] < R))


@triton.jit
def _sums(
    w0, n0, y0, C0, R0, ws0, ns0, f0, end0, w1, n1, y1, C1, R1, ws1, ns1, f1, end1,
    w2, n2, y2, C2, R2, ws2, ns2, f2, end2, w3, n3, y3, C3, R3, ws3, ns3, f3, end3,
    w4, n4, y4, C4, R4, ws4, ns4, f4, end4, w5, n5, y5, C5, R5, ws5, ns5, f5, end5,
    w6, n6, y6, C6, R6, ws6, ns6, f6, end6,
    SIZE, N, PER_PART,
    L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr, L3: tl.constexpr,
    L4: tl.constexpr, L5: tl.constexpr, L6: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr,
    T4: tl.constexpr, T5: tl.constexpr, T6: tl.constexpr,
    NUM: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program computes a block of columns of one sum, for one part of the tokens."""
    i = tl.program_id(0)
    if i < end0:
        _sum(i, w0, n0, y0, C0, R0, ws0, ns0, f0, SIZE, N, PER_PART, L0, T0, TOKENS, COLUMNS)
    if NUM > 1:  # noqa: SIM102
        if (i >= end0) & (i < end1):
            _sum(i - end0, w1, n1, y1, C1, R1, ws1, ns1, f1, SIZE, N, PER_PART, L1, T1, TOKENS, COLUMNS)
    if NUM > 2:  # noqa: SIM102
        if (i >= end1) & (i < end2):
            _sum(i - end1, w2, n2, y2, C2, R2, ws2, ns2, f2, SIZE, N, PER_PART, L2, T2, TOKENS, COLUMNS)
    if NUM > 3:  # noqa: SIM102
        if (i >= end2) & (i < end3):
            _sum(i - end2, w3, n3, y3, C3, R3, ws3, ns3, f3, SIZE, N, PER_PART, L3, T3, TOKENS, COLUMNS)
    if NUM > 4:  # noqa: SIM102
        if (i >= end3) & (i < end4):
            _sum(i - end3, w4, n4, y4, C4, R4, ws4, ns4, f4, SIZE, N, PER_PART, L4, T4, TOKENS, COLUMNS)
    if NUM > 5:  # noqa: SIM102
        if (i >= end4) & (i < end5):
            _sum(i - end4, w5, n5, y5, C5, R5, ws5, ns5, f5, SIZE, N, PER_PART, L5, T5, TOKENS, COLUMNS)
    if NUM > 6:  # noqa: SIM102
        if (i >= end5) & (i < end6):
            _sum(i - end5, w6, n6, y6, C6, R6, ws6, ns6, f6, SIZE, N, PER_PART, L6, T6, TOKENS, COLUMNS)


def sums_over_tokens(sums: Sequence[TokenSum]) -> Tensor:
    """All of them in float32, flat and one after the other."""
    tokens = len(sums[0].wide)
    sizes = [one.wide.shape[1] * one.narrow.shape[1] for one in sums]
    per_part = triton.cdiv(triton.cdiv(tokens, _PARTS), _SUM["TOKENS"]) * _SUM["TOKENS"]
    num_parts = triton.cdiv(tokens, per_part)
    parts = torch.empty(num_parts, sum(sizes), dtype=torch.float32, device=sums[0].wide.device)
    arguments: list[Any] = []
    options: dict[str, Any] = {}
    start = end = 0
    for i in range(MOST_SUMS):
        wide, narrow, factor, is_transposed = sums[min(i, len(sums) - 1)]
        assert wide.stride(1) == narrow.stride(1) == 1
        columns, rank = wide.shape[1], narrow.shape[1]
        if i < len(sums):
            end += num_parts * triton.cdiv(columns, _SUM["COLUMNS"])
        strides = wide.stride(0), narrow.stride(0)
        arguments += [wide, narrow, parts[:, start:], columns, rank, *strides, factor, end]
        options |= {f"L{i}": max(16, triton.next_power_of_2(rank)), f"T{i}": is_transposed}
        start += sizes[i] if i + 1 < len(sums) else 0
    _sums[(end,)](*arguments, parts.shape[1], tokens, per_part, NUM=len(sums), **options, **_SUM)
    return parts.sum(0)
