"""torch's tensors, types and operators as the native core sees them, and back.

Knows no group and starts nothing. What the core cannot take (sparse tensors, types that are not numbers it adds up) is
refused here, with UserError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lakh.c3 import native
from lakh.errors import UserError

__all__ = ["DTYPES", "U8", "dense", "element_of", "in_place", "one", "op_of", "running", "spread", "write"]

_SUM, _AVG, _MIN, _MAX, _PROD = (native.OPS[name] for name in ("sum", "avg", "min", "max", "prod"))
U8 = native.DTYPES["u8"]
DTYPES = {
    torch.float32: native.DTYPES["f32"],
    torch.float64: native.DTYPES["f64"],
    torch.float16: native.DTYPES["f16"],
    torch.bfloat16: native.DTYPES["bf16"],
    torch.int32: native.DTYPES["i32"],
    torch.int64: native.DTYPES["i64"],
    torch.uint8: U8,
    torch.int8: native.DTYPES["i8"],
}
_TORCH_SUM = dist.ReduceOp.SUM
_OPS = {
    dist.ReduceOp.AVG: _AVG,
    dist.ReduceOp.MIN: _MIN,
    dist.ReduceOp.MAX: _MAX,
    dist.ReduceOp.PRODUCT: _PROD,
}


def element_of(tensor: torch.Tensor, op: int, operation: str) -> tuple[int, int]:
    """The native type of a tensor's elements, and how many of it one element is (for types that are only copied)."""
    dense(tensor, operation)
    known = DTYPES.get(tensor.dtype)
    if known is not None:
        return known, 1
    if op < 0:
        return U8, tensor.element_size()
    if tensor.dtype == torch.bool and op in (_MIN, _MAX, _PROD):
        return U8, 1
    raise UserError(f"c3 {operation}", f"does not reduce {tensor.dtype}", "convert the tensor first")


def dense(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    if not (tensor.is_cpu or tensor.is_cuda) or tensor.layout != torch.strided:  # `.device` costs microseconds
        found = f"a tensor on {tensor.device} with layout {tensor.layout}"
        raise UserError(f"c3 {operation}", found, "give a dense CPU or CUDA tensor")
    return tensor


def op_of(options: Any) -> int:
    wanted = getattr(options, "reduceOp", _TORCH_SUM)
    if wanted == _TORCH_SUM:  # the commonest one
        return _SUM
    for known, number in _OPS.items():
        if wanted == known:
            return number
    raise UserError("c3", f"does not know the operator {wanted}", "use SUM, AVG, MIN, MAX or PRODUCT")


def one(tensors: Any, operation: str) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UserError(f"c3 {operation}", f"{len(tensors)} tensors at once", "give one tensor per call")
    found: torch.Tensor = tensors[0]
    return found


def in_place(tensor: torch.Tensor, copy: bool = True) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """A contiguous tensor to work on, and what brings the result back where that is a copy."""
    if tensor.is_contiguous():
        return tensor, None
    flat = tensor.contiguous() if copy else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return flat, lambda: write(tensor, flat)


def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(value.view(tensor.shape))


def spread(flat: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Callable[[], None]:
    def finish() -> None:
        at = 0
        for piece in pieces:
            write(piece, flat[at : at + piece.numel()])
            at += piece.numel()

    return finish


def running(values: Sequence[int]) -> list[int]:
    totals = [0]
    for value in values:
        totals.append(totals[-1] + value)
    return totals
