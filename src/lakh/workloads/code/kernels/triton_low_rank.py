"""Triton kernels for the small matrices of low-rank adapters on NVIDIA GPUs: one launch for all adapters of a fused
matrix.

    pack                  float32 adapters as the two bf16 matrices of one product
    thin_product          N x R by R x C for a small R, which writes at the speed of memory
    copy_with_product     N x K beside its product with K x R, in one read
    swiglu_with_product   the same of the activation of N x 2K
    sums_over_tokens      the gradients of all adapters of an operation: products whose sum runs over the tokens
    swiglu_backward       the gradient of the gate-up product, and the sums over tokens of what it has computed: B of
                          gate and up, and A of down

A step has hundreds of these matrices, and a launch takes longer than most of them. The wide operands take longer to
read than to multiply, so each is multiplied where it is written: at 1.2 billion parameters and 8,192 tokens the gate-up
gradient has 180 MB, and the activation 90 MB, in each block.

Import only where a GPU is used. low_rank.py uses them; tests/gpu compares them with plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "MOST_ADAPTERS",
    "MOST_SUMS",
    "TokenSum",
    "copy_with_product",
    "pack",
    "sums_over_tokens",
    "swiglu_backward",
    "swiglu_with_product",
    "thin_product",
]

MOST_ADAPTERS = 3
"""That `pack` takes: queries, keys and values."""
MOST_SUMS = 4
"""That `sums_over_tokens` takes: A of queries, keys and values and B of each; or A and B of the output matrix, A of
gate-up, and B of down."""
_PARTS = 4
"""Into which the tokens are split: the outputs are so small that they would leave most of the GPU idle."""
_SUM = {"TOKENS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 4}
_BLOCK = 2048
_THIN = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4}
_COPY = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4, "num_stages": 4}
_GATED = {"ROWS": 16, "COLUMNS": 128, "num_warps": 4, "num_stages": 4}
_GATED_BACKWARD = {"TOKENS": 32, "COLUMNS": 64, "num_warps": 4, "num_stages": 3}
_GATED_PARTS = 6
"""Into which `swiglu_backward` splits the tokens: an H200 runs four programs on each of 132 multiprocessors, and a
matrix of 5,504 columns has 86 of them a part."""


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
def _in_one_layout(x):
    """x, by an operation that Triton does not repeat. It would compute an activation twice: in the layout of its store,
    and in that of its product, which takes longer than to move the result through shared memory."""
    return tl.sum(x[:, :, None], 2)


@triton.jit
def _copy_with_product(
    x, b, y, low, N, K, R, X_STRIDE, B_STRIDE_K, B_STRIDE_R, Y_STRIDE,
    GATED: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """With GATED, x holds gate and up side by side, and their activation takes the place of x."""
    row, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)
    x_row, y_row = x + row[:, None].to(tl.int64) * X_STRIDE, y + row[:, None].to(tl.int64) * Y_STRIDE
    total = tl.zeros((ROWS, LANES), tl.float32)
    for first in range(0, K, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        inside = (row[:, None] < N) & (at[None, :] < K)
        part = tl.load(x_row + at[None, :], mask=inside, other=0.0)
        if GATED:
            gate, up = part.to(tl.float32), tl.load(x_row + K + at[None, :], mask=inside, other=0.0).to(tl.float32)
            part = _in_one_layout((gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty))
        tl.store(y_row + at[None, :], part, mask=inside)
        b_at = b + at[:, None] * B_STRIDE_K + k[None, :] * B_STRIDE_R
        total = tl.dot(part, tl.load(b_at, mask=(at[:, None] < K) & (k[None, :] < R), other=0.0), total)
    result, inside = total.to(y.dtype.element_ty), (row[:, None] < N) & (k[None, :] < R)
    tl.store(y_row + K + k[None, :], result, mask=inside)
    tl.store(low + row[:, None] * R + k[None, :], result, mask=inside)


def copy_with_product(x_NK: Tensor, b_KR: Tensor, y: Tensor) -> Tensor:
    """Writes [x | x b] to y, whose rows may be apart, and returns x b."""
    return _write_with_product(x_NK, b_KR, y, _COPY, is_gated=False)


def swiglu_with_product(x_NK2: Tensor, b_KR: Tensor, y: Tensor) -> Tensor:
    """Writes [z | z b] to y, whose rows may be apart, for z = swiglu(x), and returns z b."""
    return _write_with_product(x_NK2, b_KR, y, _GATED, is_gated=True)


def _write_with_product(x: Tensor, b_KR: Tensor, y: Tensor, settings: dict[str, int], *, is_gated: bool) -> Tensor:
    N, (K, R) = len(x), b_KR.shape
    assert x.stride(1) == y.stride(1) == 1
    low_NR = x.new_empty(N, R)
    _copy_with_product[(triton.cdiv(N, settings["ROWS"]),)](
        x, b_KR, y, low_NR, N, K, R, x.stride(0), *b_KR.stride(), y.stride(0),
        GATED=is_gated, LANES=max(16, triton.next_power_of_2(R)), **settings,
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
def _add_product(total, wide, narrow, token, last, R, STRIDE, LANES: tl.constexpr):
    """total + wide^T narrow, over these tokens."""
    k = tl.arange(0, LANES)
    at = token[:, None].to(tl.int64) * STRIDE + k[None, :]
    right = tl.load(narrow + at, mask=(token[:, None] < last) & (k[None, :] < R), other=0.0)
    return tl.dot(tl.trans(wide), right, total)


@triton.jit
def _store_sum(y, total, at, C, R, LANES: tl.constexpr, TRANSPOSED: tl.constexpr):
    k = tl.arange(0, LANES)
    place = k[None, :] * C + at[:, None] if TRANSPOSED else at[:, None] * R + k[None, :]
    tl.store(y + place, total, mask=(at[:, None] < C) & (k[None, :] < R))


@triton.jit
def _sum(
    job, wide, narrow, y, C, R, WIDE_STRIDE, NARROW_STRIDE, FACTOR, SIZE, N, PER_PART,
    LANES: tl.constexpr, TRANSPOSED: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, COLUMNS)
    part = job // blocks
    at = (job % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS, LANES), tl.float32)
    last = tl.minimum((part + 1) * PER_PART, N)
    for first in range(part * PER_PART, last, TOKENS):
        token = first + tl.arange(0, TOKENS)
        left_at = token[:, None].to(tl.int64) * WIDE_STRIDE + at[None, :]
        left = tl.load(wide + left_at, mask=(token[:, None] < last) & (at[None, :] < C), other=0.0)
        total = _add_product(total, left, narrow, token, last, R, NARROW_STRIDE, LANES)
    _store_sum(y + part.to(tl.int64) * SIZE, total * FACTOR, at, C, R, LANES, TRANSPOSED)


@triton.jit
def _sums(
    w0, n0, y0, C0, R0, ws0, ns0, f0, end0, w1, n1, y1, C1, R1, ws1, ns1, f1, end1,
    w2, n2, y2, C2, R2, ws2, ns2, f2, end2, w3, n3, y3, C3, R3, ws3, ns3, f3, end3,
    SIZE, N, PER_PART,
    L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr, L3: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr,
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


def _new_parts(wide: Tensor, size: int, most: int, tokens: int) -> tuple[Tensor, int]:
    """Memory for the sums over each part of the tokens, of which there are `most` at most, and the tokens of a part, a
    multiple of `tokens`."""
    per_part = triton.cdiv(triton.cdiv(len(wide), most), tokens) * tokens
    num_parts = triton.cdiv(len(wide), per_part)
    return torch.empty(num_parts, size, dtype=torch.float32, device=wide.device), per_part


def sums_over_tokens(sums: Sequence[TokenSum]) -> Tensor:
    """All of them in float32, flat and one after the other."""
    tokens = len(sums[0].wide)
    sizes = [one.wide.shape[1] * one.narrow.shape[1] for one in sums]
    parts, per_part = _new_parts(sums[0].wide, sum(sizes), _PARTS, _SUM["TOKENS"])
    num_parts = len(parts)
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


# --- swiglu_backward --------------------------------------------------------------------------------------------------


@triton.jit
def _swiglu_backward(
    grad, x, grad_x, low, grad_low, y, N, F, R, DOWN_R, X_STRIDE, LOW_STRIDE, GRAD_LOW_STRIDE, SIZE, PER_PART, SCALE,
    GATE: tl.constexpr, UP: tl.constexpr, NUM: tl.constexpr, LANES: tl.constexpr, DOWN_LANES: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program handles some columns of gate and of up, for one part of the tokens. GATE and UP: the number of the
    update of each among the NUM of the gate-up matrix, or -1."""
    at, part = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    gate_sum = tl.zeros((COLUMNS, LANES), tl.float32)
    up_sum = tl.zeros((COLUMNS, LANES), tl.float32)
    down_sum = tl.zeros((COLUMNS, DOWN_LANES), tl.float32)
    last = tl.minimum((part + 1) * PER_PART, N)
    for first in range(part * PER_PART, last, TOKENS):
        token = first + tl.arange(0, TOKENS)
        row, inside = token[:, None].to(tl.int64), (token[:, None] < last) & (at[None, :] < F)
        passed = tl.load(grad + row * F + at[None, :], mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(x + row * 2 * F + at[None, :], mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * F + F + at[None, :], mask=inside, other=0.0).to(tl.float32)
        open_ = tl.sigmoid(gate)
        silu = gate * open_
        grad_gate = _in_one_layout((passed * up * (open_ + silu * (1 - open_))).to(grad_x.dtype.element_ty))
        grad_up = _in_one_layout((passed * silu).to(grad_x.dtype.element_ty))
        tl.store(grad_x + row * X_STRIDE + at[None, :], grad_gate, mask=inside)
        tl.store(grad_x + row * X_STRIDE + F + at[None, :], grad_up, mask=inside)
        if GATE >= 0:
            gate_sum = _add_product(gate_sum, grad_gate, low + GATE * R, token, last, R, LOW_STRIDE, LANES)
        if UP >= 0:
            up_sum = _add_product(up_sum, grad_up, low + UP * R, token, last, R, LOW_STRIDE, LANES)
        inner = _in_one_layout((silu * up).to(grad_x.dtype.element_ty))
        down_sum = _add_product(down_sum, inner, grad_low, token, last, DOWN_R, GRAD_LOW_STRIDE, DOWN_LANES)
    y += part.to(tl.int64) * SIZE
    if GATE >= 0:
        _store_sum(y + GATE * R * F, gate_sum * SCALE, at, F, R, LANES, False)
    if UP >= 0:
        _store_sum(y + UP * R * F, up_sum * SCALE, at, F, R, LANES, False)
    _store_sum(y + NUM * R * F, down_sum, at, F, DOWN_R, DOWN_LANES, True)


def swiglu_backward(
    grad_NF: Tensor, x_NF2: Tensor, grad_x: Tensor, low: Tensor, grad_low: Tensor, starts: Sequence[int], scale: float
) -> Tensor:
    """Writes the gradient of x to `grad_x`, whose rows may be apart. Returns, in float32 and flat, `scale` times the
    sums over tokens of the updates of gate and up that begin at `starts` (grad_x^T low, each with its own columns), and
    grad_low^T swiglu(x)."""
    (N, F), (rank, down_rank) = grad_NF.shape, (low.shape[1] // len(starts), grad_low.shape[1])
    assert set(starts) <= {0, F}
    assert grad_NF.is_contiguous()
    assert x_NF2.is_contiguous()
    assert grad_x.stride(1) == low.stride(1) == grad_low.stride(1) == 1
    size = F * (len(starts) * rank + down_rank)
    parts, per_part = _new_parts(grad_NF, size, _GATED_PARTS, _GATED_BACKWARD["TOKENS"])
    numbers = {start: number for number, start in enumerate(starts)}
    lanes, down_lanes = (max(16, triton.next_power_of_2(one)) for one in (rank, down_rank))
    settings = _gated_backward(max(lanes, down_lanes))
    _swiglu_backward[(triton.cdiv(F, settings["COLUMNS"]), len(parts))](
        grad_NF, x_NF2, grad_x, low, grad_low, parts, N, F, rank, down_rank,
        grad_x.stride(0), low.stride(0), grad_low.stride(0), size, per_part, scale,
        GATE=numbers.get(0, -1), UP=numbers.get(F, -1), NUM=len(starts), LANES=lanes, DOWN_LANES=down_lanes, **settings,
    )  # fmt: skip
    return parts.sum(0)


def _gated_backward(lanes: int) -> dict[str, int]:
    """With many lanes fewer columns: the sums of a program are in registers."""
    columns = _GATED_BACKWARD["COLUMNS"]
    return {**_GATED_BACKWARD, "COLUMNS": max(16, min(columns, columns * 64 // lanes))}
