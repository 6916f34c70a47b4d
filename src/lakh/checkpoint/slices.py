"""The slice of a global tensor that this rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["TensorSlice", "dtype_name", "slice_of"]


@dataclass(frozen=True)
class TensorSlice:
    """The local part of a global tensor. `writes` is False if another rank writes the same part, and None for a plain
    tensor, which has no placement."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: Tensor
    writes: bool | None = None


def slice_of(tensor: Tensor | TensorSlice) -> TensorSlice:
    """The offset and shape of the local part of a tensor; a plain tensor is one slice."""
    if isinstance(tensor, TensorSlice):
        return tensor
    whole = TensorSlice(tuple(tensor.shape), (0,) * tensor.dim(), tensor)
    if type(tensor) in (Tensor, Parameter):
        return whole
    from torch.distributed.tensor import DTensor, Replicate  # two seconds of imports that a server does not need
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return whole

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # every rank is part of the mesh
    copies = zip(tensor.placements, coordinate, strict=True)
    first_copy = all(at == 0 for placement, at in copies if isinstance(placement, Replicate))
    local = tensor.to_local()
    return TensorSlice(tuple(tensor.shape), tuple(offset), local, writes=first_copy and local.numel() > 0)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
