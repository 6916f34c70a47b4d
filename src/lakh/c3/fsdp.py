"""FSDP2's buffers in registered memory, where the other ranks of a host read them without a copy in between.

    fully_shard(model, mesh=mesh)     # over backend "c3"
    register_buffers(model)

Each unit then gathers its parameters into, and reduces its gradients from, memory of `lakh.c3.memory`. Buffers go back
to its pool when FSDP2 frees them. A model on a GPU keeps its own memory: c3 stages it in registered memory anyway.
`hsdp.encode_replicas` brings a reduce-scatter of its own: call it after this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from lakh.c3.memory import registered_empty
from lakh.errors import UserError

__all__ = ["RegisteredGather", "RegisteredScatter", "Scatter", "register_buffers"]


def register_buffers(model: torch.nn.Module) -> int:
    """Let the FSDP2 units of `model` communicate out of registered memory; how many there are."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise UserError("c3, registered buffers", "the model has no FSDP2 units", "call fully_shard first")
    for unit in units:
        unit.set_custom_all_gather(RegisteredGather())  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(RegisteredScatter())  # type: ignore[arg-type]
    return len(units)


class _Registered:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.empty(*size, dtype=dtype, device=device)
        return registered_empty(tuple(size), dtype=dtype)


class RegisteredGather(_Registered):
    """FSDP2's all-gather of one unit."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter:
    """FSDP2's reduce-scatter of one unit, as it is."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class RegisteredScatter(_Registered, Scatter):
    pass
