"""The two halves of a block with low-rank adapters, each as one operation that writes the operands of its products.

    y = x W^T + (x A^T) B^T = [x | x A^T] [W | B]^T

With x A^T in columns behind x, and B in columns behind W, update and product are one product: nothing of the size of y
is written and read again for the update. A norm or an activation writes x with room behind each row, and the frozen W
has such room from the start, and rows below it for A (`widened`), for the gradient of x: [grad | grad B] [W ; A]. What
is not written here is copied beside its small product where y is as wide or wider; else they are two products. There is
no gradient of W or of the norms.

Shapes: N tokens, I inputs, O outputs, R the rank of all updates of a matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lakh.workloads.code.kernels.low_rank import (
    AdaptedMatrix,
    has_kernel,
    new_flats,
    new_operand,
    operand_columns,
    pack,
    rank_of,
    room,
    split_flat,
    sum_of_a,
    sums_of_b,
    sums_over_tokens,
    swiglu_backward,
    swiglu_with_product,
    thin_product,
)

__all__ = ["low_rank_linear_norm_feed_forward", "low_rank_norm_linear", "widened"]


class _Parts(NamedTuple):
    """Of the memory of a frozen matrix with adapters."""

    w_OI: Tensor
    a_RI: Tensor
    b_OR: Tensor
    columns: Tensor
    """W | B."""
    rows: Tensor
    """W ; A."""


def widened(matrix_OI: Tensor, rank: int) -> Tensor:
    """A copy of the matrix, with room for B behind each row and for A below the last one."""
    outputs, inputs = matrix_OI.shape
    wide = matrix_OI.new_zeros(outputs + rank, room(inputs, rank))
    wide[:outputs, :inputs] = matrix_OI
    return wide


def _parts(wide: Tensor, inputs: int, rank: int) -> _Parts:
    outputs, both = len(wide) - rank, inputs + rank
    w, a, b = wide[:outputs, :inputs], wide[outputs:, :inputs], wide[:outputs, inputs:both]
    return _Parts(w, a, b, wide[:outputs, :both], wide[:, :inputs])


def _pack_beside(wide: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], starts: Sequence[int], scale: float) -> _Parts:
    """Writes A and B beside the matrix, where there is nothing else."""
    parts = _parts(wide, a[0].shape[1], rank_of(a))
    pack(a, b, starts, scale, parts.a_RI, parts.b_OR)
    return parts


def _with_small_product(x_NK: Tensor, b_KR: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of x with x b behind it, and x b alone."""
    inputs, rank = b_KR.shape
    x, low, both = operand_columns(new_operand(x_NK, inputs, rank), inputs, rank)
    if has_kernel(x_NK, rank):
        from lakh.workloads.code.kernels import triton_low_rank

        return both, triton_low_rank.copy_with_product(x_NK, b_KR, both)
    x.copy_(x_NK)
    torch.mm(x_NK, b_KR, out=low)
    return both, low.contiguous()


def low_rank_norm_linear(
    x: Tensor, delta: Tensor, norm: Tensor, eps: float, matrix: AdaptedMatrix
) -> tuple[Tensor, Tensor]:
    """x + delta, and the product of its norm."""
    assert matrix.wide is not None
    total, y, *_ = _norm_linear(
        x.flatten(0, -2), delta.flatten(0, -2), norm, eps, *_arguments(matrix), matrix.scale
    )  # fmt: skip
    return total.view(x.shape), y.view(*x.shape[:-1], -1)


def low_rank_linear_norm_feed_forward(
    y: Tensor, output: AdaptedMatrix, x: Tensor, norm: Tensor, eps: float, gate_up: AdaptedMatrix, down: AdaptedMatrix
) -> tuple[Tensor, Tensor]:
    """x + y @ output.T, and the SwiGLU of its norm."""
    matrices = [argument for matrix in (output, gate_up, down) for argument in _arguments(matrix)]
    total, result, *_ = _half_block(y.flatten(0, -2), x.flatten(0, -2), norm, eps, *matrices, output.scale)
    return total.view(x.shape), result.view(x.shape)


def _arguments(matrix: AdaptedMatrix) -> tuple[Any, ...]:
    return matrix.wide, list(matrix.a), list(matrix.b), list(matrix.starts)


def _add_norm_into(h_NI: Tensor, x: Tensor, delta: Tensor, norm: Tensor, eps: float) -> Tensor:
    if h_NI.is_cuda:
        from lakh.workloads.code.kernels import triton

        return triton.add_norm_into(h_NI, x, delta, norm, eps)
    total = x + delta
    h_NI.copy_(F.rms_norm(total, (total.shape[-1],), norm.to(total.dtype), eps))
    return total


def _normed_product(
    matrix: _Parts, x: Tensor, delta: Tensor, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta, the product of its norm, and the norm with its small product behind it."""
    rank, inputs = matrix.a_RI.shape
    operand = new_operand(x, inputs, rank)
    h, low, both = operand_columns(operand, inputs, rank)
    total = _add_norm_into(h, x, delta, norm, eps)
    torch.mm(h, matrix.a_RI.mT, out=low)
    return total, both @ matrix.columns.mT, operand


def _add_norm_backward(
    grad_total: Tensor, grad_h: Tensor, total: Tensor, norm: Tensor, eps: float, copy: Tensor | None = None
) -> Tensor:
    """The gradient of x and delta. `copy` gets it too: a product's operand has room behind its rows, and a compiled
    graph would copy such a gradient (`tangents` of AOTAutograd are contiguous)."""
    if total.is_cuda:
        from lakh.workloads.code.kernels import triton

        return triton.add_norm_backward_with_copy(copy, grad_total, grad_h, total, norm, eps)
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    normed, grad = total * scale, grad_h * norm.to(total.dtype)
    grad_x: Tensor = grad_total + scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
    if copy is not None:
        copy.copy_(grad_x)
    return grad_x


# --- norm and product -------------------------------------------------------------------------------------------------


@torch.library.custom_op("lakh::low_rank_norm_linear", mutates_args=())
def _norm_linear(
    x: Tensor,
    delta: Tensor,
    norm: Tensor,
    eps: float,
    wide: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    starts: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta and the product; for the backward pass the norm with its small product behind it."""
    matrix = _pack_beside(wide, a, b, starts, scale)
    return _normed_product(matrix, x, delta, norm, eps)


@_norm_linear.register_fake
def _(
    x: Tensor, delta: Any, norm: Any, eps: Any, wide: Tensor, a: list[Tensor], b: Any, starts: Any, scale: Any
) -> Any:
    rank, (tokens, inputs) = rank_of(a), x.shape
    return tuple(x.new_empty(tokens, size) for size in (inputs, len(wide) - rank, room(inputs, rank)))


@torch.library.custom_op("lakh::low_rank_norm_linear_backward", mutates_args=())
def _norm_linear_backward(
    grad_total: Tensor,
    grad: Tensor,
    total: Tensor,
    operand: Tensor,
    norm: Tensor,
    eps: float,
    wide: Tensor,
    b: list[Tensor],
    starts: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The gradient of x and delta, and the flat ones of the adapters."""
    rank, inputs = len(wide) - grad.shape[1], total.shape[1]
    matrix, (h, low, _) = _parts(wide, inputs, rank), operand_columns(operand, inputs, rank)
    grad_low = grad @ matrix.b_OR
    grad_h = thin_product(grad_low, matrix.a_RI).addmm_(grad, matrix.w_OI)
    flat = sums_over_tokens([sum_of_a(h, grad_low), *sums_of_b(grad, low, b, starts, scale)])
    return _add_norm_backward(grad_total, grad_h, total, norm, eps), flat


@_norm_linear_backward.register_fake
def _(
    grad_total: Any, grad: Tensor, total: Tensor, operand: Any, norm: Any, eps: Any, wide: Tensor,
    b: list[Tensor], starts: Any, scale: Any,
) -> Any:  # fmt: skip
    rank, inputs = len(wide) - grad.shape[1], total.shape[1]
    return total.new_empty(total.shape), *new_flats(total, (rank * inputs, b))


def _norm_linear_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, norm, ctx.eps, wide, a, b, ctx.starts, ctx.scale = inputs
    total, _, operand = output
    ctx.save_for_backward(total, operand, norm, wide, *a, *b)


def _norm_linear_gradient(ctx: Any, grad_total: Tensor, grad: Tensor, *_: Any) -> Any:
    total, operand, norm, wide, *adapters = ctx.saved_tensors
    a, b = adapters[: len(ctx.starts)], adapters[len(ctx.starts) :]
    grad_x, flat = _norm_linear_backward(
        grad_total, grad.contiguous(), total, operand, norm, ctx.eps, wide, b, ctx.starts, ctx.scale
    )  # fmt: skip
    return grad_x, grad_x, None, None, None, *split_flat(flat, a, b), None, None


_norm_linear.register_autograd(_norm_linear_gradient, setup_context=_norm_linear_setup)


# --- output product, norm and feed-forward: wide0 and so on of the output matrix, 1 of gate-up, 2 of down -------------


@torch.library.custom_op("lakh::low_rank_linear_norm_feed_forward", mutates_args=())
def _half_block(
    y: Tensor,
    x: Tensor,
    norm: Tensor,
    eps: float,
    wide0: Tensor,
    a0: list[Tensor],
    b0: list[Tensor],
    starts0: list[int],
    wide1: Tensor,
    a1: list[Tensor],
    b1: list[Tensor],
    starts1: list[int],
    wide2: Tensor,
    a2: list[Tensor],
    b2: list[Tensor],
    starts2: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x + y @ output.T and the feed-forward; for the backward pass the small product of the output matrix, the norm
    with its small product behind it, the gate-up product, and the small product of down."""
    output = _pack_beside(wide0, a0, b0, starts0, scale)
    both_o, low_o = _with_small_product(y, output.a_RI.mT)
    delta = both_o @ output.columns.mT

    gate_up = _pack_beside(wide1, a1, b1, starts1, scale)
    total, product, operand = _normed_product(gate_up, x, delta, norm, eps)

    down = _pack_beside(wide2, a2, b2, starts2, scale)
    rank, inputs = down.a_RI.shape
    both = operand_columns(new_operand(x, inputs, rank), inputs, rank)[2]
    low_2 = swiglu_with_product(product, down.a_RI.mT, both)
    return total, both @ down.columns.mT, low_o, operand, product, low_2


@_half_block.register_fake
def _(
    y: Any, x: Tensor, norm: Any, eps: Any, wide0: Any, a0: Any, b0: Any, s0: Any,
    wide1: Tensor, a1: Any, b1: Any, s1: Any, wide2: Any, a2: Any, b2: Any, s2: Any, scale: Any,
) -> Any:  # fmt: skip
    tokens, inputs = x.shape
    ranks = [rank_of(a) for a in (a0, a1, a2)]
    sizes = inputs, inputs, ranks[0], room(inputs, ranks[1]), len(wide1) - ranks[1], ranks[2]
    return tuple(x.new_empty(tokens, size) for size in sizes)


@torch.library.custom_op("lakh::low_rank_linear_norm_feed_forward_backward", mutates_args=())
def _half_block_backward(
    grad_total: Tensor,
    grad: Tensor,
    total: Tensor,
    low_o: Tensor,
    operand: Tensor,
    product: Tensor,
    low_2: Tensor,
    y: Tensor,
    norm: Tensor,
    eps: float,
    wide0: Tensor,
    wide1: Tensor,
    wide2: Tensor,
    b0: list[Tensor],
    starts0: list[int],
    b1: list[Tensor],
    starts1: list[int],
    b2: list[Tensor],
    starts2: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of y and x, the flat ones of A and B of output, A of gate-up and B of down, and the flat ones of B
    of gate-up and A of down."""
    rank, outputs = len(wide1) - product.shape[1], product.shape[1]
    down = _parts(wide2, outputs // 2, low_2.shape[1])
    both_2, grad_low_2 = _with_small_product(grad, down.b_OR)
    grad_inner = both_2 @ down.rows

    gate_up, (h, low, _) = _parts(wide1, total.shape[1], rank), operand_columns(operand, total.shape[1], rank)
    grad_product, grad_low_1, both = operand_columns(new_operand(product, outputs, rank), outputs, rank)
    inner_flat = swiglu_backward(grad_inner, product, grad_product, low, grad_low_2, b1, starts1, scale)
    torch.mm(grad_product, gate_up.b_OR, out=grad_low_1)
    output = _parts(wide0, y.shape[1], low_o.shape[1])
    sizes = total.shape[1], low_o.shape[1]
    operand_o, grad_low_o, both_o = operand_columns(new_operand(total, *sizes), *sizes)
    grad_x = _add_norm_backward(grad_total, both @ gate_up.rows, total, norm, eps, operand_o)
    torch.mm(operand_o, output.b_OR, out=grad_low_o)
    grad_y = both_o @ output.rows
    sums = [sum_of_a(y, grad_low_o), *sums_of_b(grad_x, low_o, b0, starts0, scale), sum_of_a(h, grad_low_1)]
    sums += sums_of_b(grad, low_2, b2, starts2, scale)
    return grad_y, grad_x, sums_over_tokens(sums), inner_flat


@_half_block_backward.register_fake
def _(
    grad_total: Any, grad: Any, total: Tensor, low_o: Tensor, operand: Any, product: Tensor, low_2: Tensor, y: Tensor,
    norm: Any, eps: Any, wide0: Any, wide1: Tensor, wide2: Any, b0: Any, s0: Any, b1: Any, s1: Any, b2: Any, s2: Any,
    scale: Any,
) -> Any:  # fmt: skip
    rank, inner = len(wide1) - product.shape[1], product.shape[1] // 2
    outer_a = low_o.shape[1] * y.shape[1] + rank * total.shape[1]
    flats = new_flats(total, (outer_a, [*b0, *b2]), (low_2.shape[1] * inner, b1))
    return y.new_empty(y.shape), total.new_empty(total.shape), *flats


def _half_block_setup(ctx: Any, inputs: Any, output: Any) -> None:
    y, _, norm, ctx.eps, *matrices, ctx.scale = inputs
    total, _, *saved = output
    wides, ctx.starts = matrices[::4], matrices[3::4]
    adapters = [one for a, b in zip(matrices[1::4], matrices[2::4], strict=True) for one in (*a, *b)]
    ctx.save_for_backward(total, *saved, y, norm, *wides, *adapters)


def _half_block_gradient(ctx: Any, grad_total: Tensor, grad: Tensor, *_: Any) -> Any:
    total, low_o, operand, product, low_2, y, norm, *others = ctx.saved_tensors
    wides, adapters = others[:3], others[3:]
    lists = iter(adapters)
    a0, b0, a1, b1, a2, b2 = (list(itertools.islice(lists, len(starts))) for starts in ctx.starts for _ in "ab")
    starts0, starts1, starts2 = ctx.starts
    grad_y, grad_x, outer, inner = _half_block_backward(
        grad_total, grad.contiguous(), total, low_o, operand, product, low_2, y, norm, ctx.eps,
        *wides, b0, starts0, b1, starts1, b2, starts2, ctx.scale,
    )  # fmt: skip
    grad_a0, grad_b0, grad_a1, grad_b2 = split_flat(outer, a0, b0, a1, b2)
    grad_b1, grad_a2 = split_flat(inner, b1, a2)
    grads = None, grad_a0, grad_b0, None, None, grad_a1, grad_b1, None, None, grad_a2, grad_b2, None
    return grad_y, grad_x, None, None, *grads, None


_half_block.register_autograd(_half_block_gradient, setup_context=_half_block_setup)
