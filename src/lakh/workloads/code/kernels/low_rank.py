"""A frozen matrix with low-rank updates as one operation: y = x W^T + (x A^T) B^T; and a gated feed-forward of two.

The large product is added to the small one in place, which plain torch and the compiler do not: they write both, read
them and write the sum, which for a feed-forward takes a third of the time of the product itself. The feed-forward also
computes its activation again in the backward pass instead of keeping it. There is no gradient of W.

A fused matrix has an update for each of its parts (queries, keys, values). Their adapters are packed into one A and one
B, and all of their gradients are one flat tensor in float32: a small matrix costs little more than its launch.

Shapes: N tokens, I inputs, O outputs, R the rank of all updates, F the feed-forward's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lakh.workloads.code.kernels.nf4 import dequantize

__all__ = ["AdaptedMatrix", "low_rank_feed_forward", "low_rank_linear", "stacked"]

ALIGNMENT = 64
"""Columns: rows that begin at 128 bytes."""
MOST_RANK = 512
"""Columns of a small matrix that the kernels take: a tile of more does not fit into shared memory."""


class AdaptedMatrix(NamedTuple):
    """A frozen matrix, and the low-rank updates that are computed beside it."""

    base: Tensor
    a: Sequence[Tensor]
    """Of each update: its rank x inputs."""
    b: Sequence[Tensor]
    """Of each update: its outputs x its rank, which is that of the others."""
    starts: Sequence[int]
    """The first output of each update."""
    scale: float
    """Of all B."""
    scales: Tensor | None = None
    """Of a base in 4 bits (nf4.py), which is expanded when it is used."""
    wide: Tensor | None = None
    """The memory of the base, with columns behind it and rows below it, to which low_rank_block.py writes B and A."""


def pack(
    a: Sequence[Tensor], b: Sequence[Tensor], starts: Sequence[int], scale: float, packed_a: Tensor, packed_b: Tensor
) -> None:
    """Writes the A matrices below each other, and `scale` times the B matrices, each to its own rows and columns."""
    if packed_b.is_cuda:
        from lakh.workloads.code.kernels import triton_low_rank

        if len(a) <= triton_low_rank.MOST_ADAPTERS:
            triton_low_rank.pack(a, b, starts, scale, packed_a, packed_b)
            return
    stacked_a, stacked_b = _stacked(a, b, starts, scale, len(packed_b), packed_b.dtype)
    packed_a.copy_(stacked_a)
    packed_b.copy_(stacked_b)


def _packed(
    a: Sequence[Tensor], b: Sequence[Tensor], starts: Sequence[int], scale: float, outputs: int, x: Tensor
) -> tuple[Tensor, Tensor]:
    packed_a, packed_b = x.new_empty(rank_of(a), a[0].shape[1]), x.new_empty(outputs, rank_of(a))
    pack(a, b, starts, scale, packed_a, packed_b)
    return packed_a, packed_b


def _stacked(
    a: Sequence[Tensor], b: Sequence[Tensor], starts: Sequence[int], scale: float, outputs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `pack`, differentiable."""
    rank, columns = len(a[0]), len(a) * len(a[0])
    rows = []
    for number, (matrix, start) in enumerate(zip(b, starts, strict=True)):
        left, after = number * rank, outputs - start - len(matrix)
        rows.append(F.pad(matrix, (left, columns - left - rank, start, after)))
    return torch.cat(list(a)).to(dtype), (sum(rows) * scale).to(dtype)  # type: ignore[union-attr]


def stacked(matrix: AdaptedMatrix, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A and B of all updates of a matrix, for plain products."""
    base, a, b, starts, scale, *_ = matrix
    return _stacked(a, b, starts, scale, len(base), dtype)


def has_kernel(x: Tensor, rank: int) -> bool:
    """Whether the Triton kernels multiply x with small matrices of `rank` columns."""
    return x.is_cuda and rank <= MOST_RANK


def room(inputs: int, rank: int) -> int:
    """Columns of an operand with its small product, of `rank` columns, behind it."""
    return -(-(inputs + rank) // ALIGNMENT) * ALIGNMENT


def new_operand(x: Tensor, inputs: int, rank: int) -> Tensor:
    """Memory for as many rows as x has, with room for a small product behind each."""
    return x.new_empty(len(x), room(inputs, rank))


def operand_columns(operand: Tensor, inputs: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The operand, its small product behind it, and both."""
    return operand[:, :inputs], operand[:, inputs : inputs + rank], operand[:, : inputs + rank]


class _Sum(NamedTuple):
    """factor * wide^T narrow, or its transpose."""

    wide: Tensor
    narrow: Tensor
    factor: float = 1.0
    is_transposed: bool = False


def sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def sums_over_tokens(sums: Sequence[_Sum]) -> Tensor:
    """All of them, in float32 at least, flat and one after the other."""
    if has_kernel(sums[0].wide, max(one.narrow.shape[1] for one in sums)):
        from lakh.workloads.code.kernels import triton_low_rank

        if len(sums) <= triton_low_rank.MOST_SUMS:
            return triton_low_rank.sums_over_tokens([triton_low_rank.TokenSum(*one) for one in sums])
    found = []
    for wide, narrow, factor, is_transposed in sums:
        left, right = (narrow, wide) if is_transposed else (wide, narrow)
        found.append(((left.mT @ right).to(sum_dtype(wide)) * factor).flatten())
    return torch.cat(found)


def sum_of_a(x_NI: Tensor, grad_low: Tensor) -> _Sum:
    """The gradient of all A of a matrix, below each other."""
    return _Sum(x_NI, grad_low, is_transposed=True)


def sums_of_b(grad_NO: Tensor, low_NR: Tensor, b: Sequence[Tensor], starts: Any, scale: float) -> list[_Sum]:
    """The gradient of each B of a matrix."""
    rank = b[0].shape[1]
    sums = []
    for number, (matrix, start) in enumerate(zip(b, starts, strict=True)):
        low = low_NR[:, number * rank : (number + 1) * rank]
        sums.append(_Sum(grad_NO[:, start : start + len(matrix)], low, scale))
    return sums


def split_flat(flat: Tensor, *adapters: Sequence[Tensor]) -> list[list[Tensor]]:
    """The gradients of each list of A or B from flat sums in the same order."""
    parts = iter(flat.split([matrix.numel() for matrices in adapters for matrix in matrices]))
    return [[next(parts).view(matrix.shape).to(matrix.dtype) for matrix in matrices] for matrices in adapters]


def low_rank_linear(x: Tensor, matrix: AdaptedMatrix) -> Tensor:
    w_OI, a, b, starts, scale, scales, _ = matrix
    y: Tensor = _forward(x.flatten(0, -2), w_OI, list(a), list(b), list(starts), scale, scales)[0]
    return y.view(*x.shape[:-1], w_OI.shape[0])


def _expanded(w_OI: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    return w_OI if scales is None else dequantize(w_OI, scales, dtype)


def _product(x_NI: Tensor, w_OI: Tensor, scales: Tensor | None, low_NR: Tensor, b_OR: Tensor) -> Tensor:
    return (low_NR @ b_OR.mT).addmm_(x_NI, _expanded(w_OI, scales, x_NI.dtype).mT)


def thin_product(low_NR: Tensor, a_RI: Tensor) -> Tensor:
    """low @ a for a small R."""
    if has_kernel(low_NR, low_NR.shape[1]):
        from lakh.workloads.code.kernels import triton_low_rank

        return triton_low_rank.thin_product(low_NR, a_RI)
    return low_NR @ a_RI


def _input_gradient(grad_NO: Tensor, w_OI: Tensor, scales: Tensor | None, grad_low: Tensor, a_RI: Tensor) -> Tensor:
    return thin_product(grad_low, a_RI).addmm_(grad_NO, _expanded(w_OI, scales, grad_NO.dtype))


@torch.library.custom_op("lakh::low_rank_linear", mutates_args=())
def _forward(
    x_NI: Tensor, w_OI: Tensor, a: list[Tensor], b: list[Tensor], starts: list[int], scale: float, scales: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y; for the backward pass x A^T and the packed A and B."""
    a_RI, b_OR = _packed(a, b, starts, scale, w_OI.shape[0], x_NI)
    low_NR = x_NI @ a_RI.mT
    return _product(x_NI, w_OI, scales, low_NR, b_OR), low_NR, a_RI, b_OR


@_forward.register_fake
def _(x: Tensor, w_OI: Tensor, a: list[Tensor], b: list[Tensor], starts: list[int], scale: float, scales: Any) -> Any:
    return x.new_empty(len(x), len(w_OI)), *_fake_update(x, len(w_OI), a)


def rank_of(a: Sequence[Tensor]) -> int:
    """Of all updates of a matrix."""
    return sum(len(matrix) for matrix in a)


def _fake_update(x: Tensor, outputs: int, a: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    rank = rank_of(a)
    return x.new_empty(len(x), rank), x.new_empty(rank, a[0].shape[1]), x.new_empty(outputs, rank)


@torch.library.custom_op("lakh::low_rank_linear_backward", mutates_args=())
def _backward(
    grad_NO: Tensor,
    low_NR: Tensor,
    a_RI: Tensor,
    b_OR: Tensor,
    x_NI: Tensor,
    w_OI: Tensor,
    scales: Tensor | None,
    b: list[Tensor],
    starts: list[int],
    scale: float,
    needs_x: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient of x, empty where it is not needed, and the flat ones of the adapters."""
    grad_low = grad_NO @ b_OR
    grad_x = _input_gradient(grad_NO, w_OI, scales, grad_low, a_RI) if needs_x else x_NI.new_empty(0)
    sums = [sum_of_a(x_NI, grad_low), *sums_of_b(grad_NO, low_NR, b, starts, scale)]
    return grad_x, sums_over_tokens(sums)


@_backward.register_fake
def _(
    grad: Any, low: Any, a_RI: Tensor, b_OR: Any, x: Tensor, w: Any, scales: Any, b: Any, starts: Any, scale: Any,
    needs_x: bool,
) -> Any:  # fmt: skip
    return x.new_empty(x.shape if needs_x else 0), *new_flats(x, (a_RI.numel(), b))


def new_flats(x: Tensor, *parts: tuple[int, Sequence[Tensor]]) -> list[Tensor]:
    """Memory for flat gradients: of each part the numbers of A, and the matrices B."""
    sizes = [numel + sum(matrix.numel() for matrix in b) for numel, b in parts]
    return [x.new_empty(size, dtype=sum_dtype(x)) for size in sizes]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x_NI, w_OI, a, b, starts, scale, scales = inputs
    ctx.save_for_backward(*output[1:], x_NI, w_OI, scales, *a, *b)
    ctx.starts, ctx.scale = starts, scale
    ctx.set_materialize_grads(False)  # only the first output has a gradient


def _gradient(ctx: Any, grad_y: Tensor, *_: Any) -> Any:
    saved, adapters = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
    a, b = list(adapters[: len(ctx.starts)]), list(adapters[len(ctx.starts) :])
    needs_x = ctx.needs_input_grad[0]  # the first block reads a frozen embedding
    grad_x, flat = _backward(grad_y.contiguous(), *saved, b, ctx.starts, ctx.scale, needs_x)
    return grad_x if needs_x else None, None, *split_flat(flat, a, b), None, None, None


_forward.register_autograd(_gradient, setup_context=_setup)


# --- feed-forward: w1 and so on of the fused gate-up matrix, w2 and so on of the down matrix ------------------


def low_rank_feed_forward(x: Tensor, gate_up: AdaptedMatrix, down: AdaptedMatrix) -> Tensor:
    """SwiGLU."""
    matrices = [(m.base, m.scales, list(m.a), list(m.b), list(m.starts), m.scale) for m in (gate_up, down)]
    y: Tensor = _ffn(x.flatten(0, -2), *matrices[0], *matrices[1])[0]
    return y.view(x.shape)


def swiglu_with_product(x_NF2: Tensor, b_FR: Tensor, y: Tensor) -> Tensor:
    """Writes z = swiglu(x) to y, with z b behind it, and returns z b. Rows of y may be apart."""
    if has_kernel(x_NF2, b_FR.shape[1]):
        from lakh.workloads.code.kernels import triton_low_rank

        return triton_low_rank.swiglu_with_product(x_NF2, b_FR, y)
    gate, up = x_NF2.chunk(2, dim=-1)
    inner = F.silu(gate) * up
    low = inner @ b_FR
    y.copy_(torch.cat((inner, low), dim=-1))
    return low


def swiglu_backward(
    grad_NF: Tensor,
    x_NF2: Tensor,
    grad_x: Tensor,
    low_NR: Tensor,
    grad_low: Tensor,
    b: Sequence[Tensor],
    starts: Sequence[int],
    scale: float,
) -> Tensor:
    """Writes the gradient of x, the gate-up product, to `grad_x`, whose rows may be apart. Returns the gradients of B
    of the gate-up matrix, whose small product is `low`, and of A of the down matrix, flat: on a GPU one kernel computes
    them from what it has in registers, and swiglu(x) is not written again."""
    if has_kernel(x_NF2, max(b[0].shape[1], grad_low.shape[1])):
        from lakh.workloads.code.kernels import triton_low_rank

        return triton_low_rank.swiglu_backward(grad_NF, x_NF2, grad_x, low_NR, grad_low, starts, scale)
    gate, up = x_NF2.chunk(2, dim=-1)
    open_ = torch.sigmoid(gate)
    silu = gate * open_
    torch.cat((grad_NF * up * open_ * (1 + gate * (1 - open_)), grad_NF * silu), dim=-1, out=grad_x)
    return sums_over_tokens([*sums_of_b(grad_x, low_NR, b, starts, scale), sum_of_a(silu * up, grad_low)])


@torch.library.custom_op("lakh::low_rank_feed_forward", mutates_args=())
def _ffn(
    x: Tensor,
    w1: Tensor,
    scales1: Tensor | None,
    a1: list[Tensor],
    b1: list[Tensor],
    starts1: list[int],
    scale1: float,
    w2: Tensor,
    scales2: Tensor | None,
    a2: list[Tensor],
    b2: list[Tensor],
    starts2: list[int],
    scale2: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The result; for the backward pass the gate-up product, and x A^T and the packed A and B of both matrices."""
    packed_a1, packed_b1 = _packed(a1, b1, starts1, scale1, w1.shape[0], x)
    low1 = x @ packed_a1.mT
    product = _product(x, w1, scales1, low1, packed_b1)
    packed_a2, packed_b2 = _packed(a2, b2, starts2, scale2, w2.shape[0], x)
    inner, _, both = operand_columns(new_operand(x, *packed_a2.mT.shape), *packed_a2.mT.shape)
    low2 = swiglu_with_product(product, packed_a2.mT, both)
    y = _product(inner, w2, scales2, low2, packed_b2)
    return y, product, low1, packed_a1, packed_b1, low2, packed_a2, packed_b2


@_ffn.register_fake
def _(
    x: Tensor, w1: Tensor, s1: Any, a1: Any, b1: Any, st1: Any, sc1: Any, w2: Tensor, s2: Any, a2: Any, *_: Any
) -> Any:
    y, product = x.new_empty(len(x), len(w2)), x.new_empty(len(x), len(w1))
    return y, product, *_fake_update(x, len(w1), a1), *_fake_update(x, len(w2), a2)


@torch.library.custom_op("lakh::low_rank_feed_forward_backward", mutates_args=())
def _ffn_backward(
    grad: Tensor,
    product: Tensor,
    low1: Tensor,
    packed_a1: Tensor,
    packed_b1: Tensor,
    low2: Tensor,
    packed_a2: Tensor,
    packed_b2: Tensor,
    x: Tensor,
    w1: Tensor,
    scales1: Tensor | None,
    w2: Tensor,
    scales2: Tensor | None,
    b1: list[Tensor],
    starts1: list[int],
    scale1: float,
    b2: list[Tensor],
    starts2: list[int],
    scale2: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x, and the flat ones of A of gate-up and B of down, and of B of gate-up and A of down."""
    grad_low2 = grad @ packed_b2
    grad_inner = _input_gradient(grad, w2, scales2, grad_low2, packed_a2)
    grad_product = torch.empty_like(product)
    inner_flat = swiglu_backward(grad_inner, product, grad_product, low1, grad_low2, b1, starts1, scale1)
    grad_low1 = grad_product @ packed_b1
    grad_x = _input_gradient(grad_product, w1, scales1, grad_low1, packed_a1)
    outer_flat = sums_over_tokens([sum_of_a(x, grad_low1), *sums_of_b(grad, low2, b2, starts2, scale2)])
    return grad_x, outer_flat, inner_flat


@_ffn_backward.register_fake
def _(
    grad: Any, product: Any, low1: Any, a1: Tensor, packed_b1: Any, low2: Any, a2: Tensor, packed_b2: Any, x: Tensor,
    w1: Any, s1: Any, w2: Any, s2: Any, b1: list[Tensor], st1: Any, sc1: Any, b2: list[Tensor], st2: Any, sc2: Any,
) -> Any:  # fmt: skip
    return x.new_empty(x.shape), *new_flats(x, (a1.numel(), b2), (a2.numel(), b1))


def _ffn_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, w1, scales1, a1, b1, starts1, scale1, w2, scales2, a2, b2, starts2, scale2 = inputs
    ctx.save_for_backward(*output[1:], x, w1, scales1, w2, scales2, *a1, *b1, *a2, *b2)
    ctx.starts, ctx.scales = (starts1, starts2), (scale1, scale2)
    ctx.set_materialize_grads(False)  # only the first output has a gradient


def _ffn_gradient(ctx: Any, grad: Tensor, *_: Any) -> Any:
    saved, adapters = ctx.saved_tensors[:12], list(ctx.saved_tensors[12:])
    (starts1, starts2), (scale1, scale2) = ctx.starts, ctx.scales
    ends = [len(starts1), 2 * len(starts1), 2 * len(starts1) + len(starts2)]
    a1, b1, a2, b2 = adapters[: ends[0]], adapters[ends[0] : ends[1]], adapters[ends[1] : ends[2]], adapters[ends[2] :]
    grad_x, outer, inner = _ffn_backward(grad.contiguous(), *saved, b1, starts1, scale1, b2, starts2, scale2)
    (grad_a1, grad_b2), (grad_b1, grad_a2) = split_flat(outer, a1, b2), split_flat(inner, b1, a2)
    return grad_x, None, None, grad_a1, grad_b1, None, None, None, None, grad_a2, grad_b2, None, None


_ffn.register_autograd(_ffn_gradient, setup_context=_ffn_setup)
