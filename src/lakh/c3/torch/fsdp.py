"""FSDP2 buffers in registered memory, which the other ranks of a host read without an intermediate copy.

    fully_shard(model, mesh=mesh)     # over backend "c3"
    register_buffers(model)

Each unit then gathers its parameters into registered memory and reduces its gradients from it. Buffers return to the
pool when FSDP2 frees them. A model on a GPU keeps its memory: c3 stages it in registered memory anyway.
`hsdp.encode_replicas` replaces the reduce-scatter: call it after this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from lakh.c3.torch.registered_memory import registered_empty
from lakh.errors import UserError

__all__ = ["PlainReduceScatter", "RegisteredAllGather", "RegisteredReduceScatter", "register_buffers"]


def register_buffers(model: torch.nn.Module) -> int:
    """Make the FSDP2 units of `model` communicate from registered memory. Returns the number of units."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise UserError("c3, registered buffers", "the model has no FSDP2 units", "call fully_shard first")
    for unit in units:
        unit.set_custom_all_gather(RegisteredAllGather())  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(RegisteredReduceScatter())  # type: ignore[arg-type]
    return len(units)


class _RegisteredAllocator:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.empty(*size, dtype=dtype, device=device)
        return registered_empty(tuple(size), dtype=dtype)


class RegisteredAllGather(_RegisteredAllocator):
    """FSDP2's all-gather of one unit."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class PlainReduceScatter:
    """FSDP2's default reduce-scatter of one unit."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class RegisteredReduceScatter(_RegisteredAllocator, PlainReduceScatter):
    pass
