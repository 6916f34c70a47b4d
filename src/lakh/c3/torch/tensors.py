"""Conversions between torch tensors, types and operators and those of the native core.

Rejects with UserError what the core does not support: sparse tensors, and reductions of unsupported types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lakh.c3 import native
from lakh.errors import UserError

__all__ = [
    "DTYPES",
    "U8",
    "as_contiguous",
    "copy_into",
    "native_dtype",
    "native_op",
    "require_dense",
    "single_tensor",
    "unpack_into",
]

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


def native_dtype(tensor: torch.Tensor, op: int, operation: str) -> tuple[int, int]:
    """The native type of a tensor's elements, and how many of them make up one (for types that are only copied)."""
    require_dense(tensor, operation)
    known = DTYPES.get(tensor.dtype)
    if known is not None:
        return known, 1
    if op < 0:
        return U8, tensor.element_size()
    if tensor.dtype == torch.bool and op in (_MIN, _MAX, _PROD):
        return U8, 1
    raise UserError(f"c3 {operation}", f"cannot reduce {tensor.dtype}", "convert the tensor first")


def require_dense(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    if not (tensor.is_cpu or tensor.is_cuda) or tensor.layout != torch.strided:  # `.device` costs microseconds
        found = f"a tensor on {tensor.device} with layout {tensor.layout}"
        raise UserError(f"c3 {operation}", found, "give a dense CPU or CUDA tensor")
    return tensor


def native_op(options: Any) -> int:
    wanted = getattr(options, "reduceOp", _TORCH_SUM)
    if wanted == _TORCH_SUM:  # the most common
        return _SUM
    for known, number in _OPS.items():
        if wanted == known:
            return number
    raise UserError("c3", f"does not support the operator {wanted}", "use SUM, AVG, MIN, MAX or PRODUCT")


def single_tensor(tensors: Any, operation: str) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UserError(f"c3 {operation}", f"{len(tensors)} tensors in one call", "give one tensor per call")
    found: torch.Tensor = tensors[0]
    return found


def as_contiguous(tensor: torch.Tensor, copy: bool = True) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """A contiguous tensor, and a function that copies the result back if that tensor is a copy."""
    if tensor.is_contiguous():
        return tensor, None
    flat = tensor.contiguous() if copy else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return flat, lambda: copy_into(tensor, flat)


def copy_into(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(value.view(tensor.shape))


def unpack_into(flat: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Callable[[], None]:
    """A function that copies consecutive parts of `flat` into `pieces`."""

    def finish() -> None:
        for piece, part in zip(pieces, flat.split([piece.numel() for piece in pieces]), strict=True):
            copy_into(piece, part)

    return finish
