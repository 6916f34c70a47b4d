"""Exact sparse updates on an NVIDIA GPU: each looked-up row is updated once, with the sum of its gradients.

    update_rows        a program takes several rows with at most CHUNK lookups, adds their gradients and updates them
    sum_chunks         a program adds the gradients of CHUNK lookups of a row with more of them
    update_hot_rows    a program adds the sums of the chunks of such a row in their order and updates it

The lookups are sorted by row with a stable sort (triton_sort.py), each row is written by one program, and every sum has
an order that depends on the row's lookups alone. So the result has the same bits in every run, and for every placement
of whole tables or columns. There are no atomic operations.

Legend: R rows of all tables, W values of a row, N lookups, B samples, C columns of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lakh.workloads.dlrm.embedding.triton_sort import UNIT, SortedLookups

__all__ = ["RowState", "gradient_square", "update"]

CHUNK = 64  # lookups of a row that one program adds
ROWS_VALUES, TILE_VALUES = 1024, 1024  # values of the rows that a program updates, or adds, at once
SGD, ADAGRAD, ADAM, SQUARE = 0, 1, 2, 3
KINDS = {"sgd": SGD, "rowwise-adagrad": ADAGRAD, "rowwise-adam": ADAM}


@dataclass(frozen=True, eq=False)
class RowState:
    weights_RW: Tensor
    square_R: Tensor
    """Not read by SGD."""
    mean_RW: Tensor
    """Read by Adam alone."""


@triton.jit
def _apply(weights, square, mean, number, row, valid, at_w, total, scale, lr, eps, beta1, beta2, correction1,
           correction2, W: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Rows of a tile. `total`: their gradients. KIND 3 only stores the sum of squares of a gradient, by the number of
    the run."""
    total *= scale
    if KIND == 3:
        tl.store(square + number, tl.sum(total * total, axis=1), mask=valid)
    else:
        at = row[:, None] * W + at_w[None, :]
        mask = valid[:, None] & (at_w < W)[None, :]
        values = tl.load(weights + at, mask=mask, other=0.0)
        if KIND == 0:
            values -= lr * total
        else:
            mean_square = tl.sum(total * total, axis=1) / W
            before = tl.load(square + row, mask=valid, other=1.0)
            if KIND == 1:
                after = before + mean_square
                values -= (lr / (tl.sqrt(after) + eps))[:, None] * total
            else:
                after = beta2 * before + (1 - beta2) * mean_square
                moment = beta1 * tl.load(mean + at, mask=mask, other=0.0) + (1 - beta1) * total
                tl.store(mean + at, moment, mask=mask)
                values -= (lr / correction1 / (tl.sqrt(after) / correction2 + eps))[:, None] * moment
            tl.store(square + row, after, mask=valid)
        tl.store(weights + at, values, mask=mask)


@triton.jit(do_not_specialize=["lookups"])
def _update_rows(weights, square, mean, gradient, rows, slots, runs, starts, lookups, scale, lr, eps, beta1,
                 beta2, correction1, correction2, W: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
                 ROWS: tl.constexpr, CHUNK_: tl.constexpr, UNIT_: tl.constexpr):  # fmt: skip
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = number < tl.load(runs + lookups - 1)
    at_w = tl.arange(0, BLOCK)
    start = tl.load(starts + number, mask=inside, other=0)
    length = tl.load(starts + number + 1, mask=inside, other=0) - start
    valid = inside & (length <= CHUNK_)
    row = tl.load(rows + start, mask=valid, other=0).to(tl.int64)
    slot = tl.load(slots + start, mask=valid, other=0).to(tl.int64)
    mask = valid[:, None] & (at_w < W)[None, :]
    total = tl.load(gradient + slot[:, None] * UNIT_ + at_w[None, :], mask=mask, other=0.0)
    for position in range(1, tl.max(tl.where(valid, length, 0), axis=0)):
        more = valid & (position < length)
        slot = tl.load(slots + start + position, mask=more, other=0).to(tl.int64)
        mask = more[:, None] & (at_w < W)[None, :]
        total += tl.load(gradient + slot[:, None] * UNIT_ + at_w[None, :], mask=mask, other=0.0)
    _apply(weights, square, mean, number, row, valid, at_w, total, scale, lr, eps, beta1, beta2, correction1,
           correction2, W, KIND)  # fmt: skip


@triton.jit(do_not_specialize=["lookups"])
def _sum_chunks(gradient, slots, runs, starts, partial, lookups, W: tl.constexpr, BLOCK: tl.constexpr,
                TILE: tl.constexpr, CHUNK_: tl.constexpr, UNIT_: tl.constexpr):  # fmt: skip
    """Program 2 p takes the chunk that starts among the positions [p x CHUNK, (p + 1) x CHUNK) of a run that started
    before them, program 2 p + 1 the first chunk of a run that starts among them. A run that needs chunks is longer than
    these positions, so that there is at most one of each."""
    program = tl.program_id(0)
    first = program // 2 * CHUNK_
    last = tl.minimum(first + CHUNK_, lookups) - 1
    is_start = program % 2 == 1
    run = tl.load(runs + tl.where(is_start, last, first)) - 1
    start, end = tl.load(starts + run), tl.load(starts + run + 1)
    begin = tl.where(is_start, start, start + (first - start + CHUNK_ - 1) // CHUNK_ * CHUNK_)
    if (end - start > CHUNK_) & (begin < end) & (is_start == (start >= first)):
        at_w, at_l = tl.arange(0, BLOCK), tl.arange(0, TILE)
        end = tl.minimum(end, begin + CHUNK_)
        total = tl.zeros([BLOCK], tl.float32)
        for position in range(begin, end, TILE):
            inside = position + at_l < end
            slot = tl.load(slots + position + at_l, mask=inside, other=0).to(tl.int64)
            mask = inside[:, None] & (at_w < W)[None, :]
            total += tl.sum(tl.load(gradient + slot[:, None] * UNIT_ + at_w[None, :], mask=mask, other=0.0), axis=0)
        tl.store(partial + program.to(tl.int64) * W + at_w, total, mask=at_w < W)


@triton.jit(do_not_specialize=["lookups"])
def _update_hot_rows(weights, square, mean, partial, rows, runs, starts, lookups, scale, lr, eps, beta1, beta2,
                     correction1, correction2, W: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
                     TILE: tl.constexpr, CHUNK_: tl.constexpr):  # fmt: skip
    first = tl.program_id(0) * CHUNK_
    run = tl.load(runs + tl.minimum(first + CHUNK_, lookups) - 1) - 1
    start, end = tl.load(starts + run), tl.load(starts + run + 1)
    if (start >= first) & (end - start > CHUNK_):
        at_w, at_l = tl.arange(0, BLOCK), tl.arange(0, TILE)
        count = (end - start + CHUNK_ - 1) // CHUNK_
        total = tl.zeros([BLOCK], tl.float32)
        for chunk in range(0, count, TILE):
            number = chunk + at_l
            place = (2 * (start // CHUNK_ + number) + (number == 0).to(tl.int32)).to(tl.int64)  # see _sum_chunks
            mask = (number < count)[:, None] & (at_w < W)[None, :]
            total += tl.sum(tl.load(partial + place[:, None] * W + at_w[None, :], mask=mask, other=0.0), axis=0)
        one = tl.zeros([1], tl.int32)
        row = tl.load(rows + start + one).to(tl.int64)
        _apply(weights, square, mean, run + one, row, one == 0, at_w, total[None, :], scale, lr, eps, beta1,
               beta2, correction1, correction2, W, KIND)  # fmt: skip


def _launch(state: RowState, found: SortedLookups, grad_BC: Tensor, width: int, kind: int, *constants: float) -> None:
    count = len(found)
    if not count:
        return
    block = triton.next_power_of_2(width)
    at_once = max(1, ROWS_VALUES // block)
    options = {"W": width, "BLOCK": block, "CHUNK_": CHUNK}
    tensors = state.weights_RW, state.square_R, state.mean_RW
    _update_rows[(triton.cdiv(count, at_once),)](
        *tensors, grad_BC, found.rows, found.slots, found.runs, found.starts, count, *constants, KIND=kind,
        ROWS=at_once, UNIT_=UNIT, **options, num_warps=2,
    )  # fmt: skip
    if count <= CHUNK:
        return
    blocks, tile = triton.cdiv(count, CHUNK), max(1, TILE_VALUES // block)
    partial = torch.empty(2 * blocks, width, device=grad_BC.device)
    _sum_chunks[(2 * blocks,)](
        grad_BC, found.slots, found.runs, found.starts, partial, count, TILE=min(tile, CHUNK), UNIT_=UNIT, **options,
        num_warps=1,
    )  # fmt: skip
    _update_hot_rows[(blocks,)](
        *tensors, partial, found.rows, found.runs, found.starts, count, *constants, KIND=kind, TILE=tile, **options,
        num_warps=1,
    )  # fmt: skip


def update(
    state: RowState,
    found: SortedLookups,
    grad_BC: Tensor,
    optimizer: str,
    *,
    scale: float,
    lr: float,
    eps: float,
    betas: tuple[float, float],
    step: int,
) -> None:
    """Update each looked-up row once, with `grad_BC` times `scale`."""
    corrections = 1 - betas[0] ** step, (1 - betas[1] ** step) ** 0.5
    _launch(state, found, grad_BC, state.weights_RW.shape[1], KINDS[optimizer], scale, lr, eps, *betas, *corrections)


def gradient_square(found: SortedLookups, grad_BC: Tensor, width: int) -> Tensor:
    """The sum of squares of the summed gradients of all looked-up rows, f64, on the device."""
    squares = torch.zeros(len(found), device=grad_BC.device)
    state = RowState(grad_BC, squares, grad_BC)
    _launch(state, found, grad_BC, width, SQUARE, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    return squares.sum(dtype=torch.float64)
