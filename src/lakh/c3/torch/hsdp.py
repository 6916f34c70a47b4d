"""Compressed gradients between the replicas of hybrid sharding (FSDP2 on a mesh of replicas x shards).

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))     # over backend "c3"
    fully_shard(model, mesh=mesh)
    encode_replicas(model, mesh.get_group("replicate"), "int4")

FSDP2 reduces the gradients of each unit inside a replica and then between the replicas. Only the second sum, the one on
the slow tier, is encoded. The codec's error is added to the same unit's gradients at the next step (the residual, as
large as a rank's shard of the gradients; not saved in checkpoints, zero after a resume). Other sums over the same group
(a loss, a norm) are unaffected.

FSDP2 lets each unit provide its own reduce-scatter, which also allocates the tensor that is then summed between the
replicas; this identifies the unit. Fails with UserError if gradients are not reduced in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from lakh.c3.torch.backend import C3ProcessGroup
from lakh.c3.torch.fsdp import PlainReduceScatter
from lakh.errors import UserError
from lakh.spec.schedule import codec_bytes

__all__ = ["EncodedReduceScatter", "encode_replicas"]


def encode_replicas(
    model: torch.nn.Module, group: Any, codec: str = "int4", *, feedback: bool = True
) -> list[EncodedReduceScatter]:
    """Encode the sums of the FSDP2 units of `model` over `group`, the replicas. Returns one state per unit."""
    if not isinstance(group, C3ProcessGroup):
        raise UserError(
            "c3 replica encoding", f"the group is a {type(group).__name__}", 'make the mesh over backend="c3"'
        )
    codec_bytes(codec, 0)  # raises for an unknown codec
    units = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            unit = EncodedReduceScatter(group, codec, feedback)
            module.set_custom_reduce_scatter(unit)  # type: ignore[arg-type]
            units.append(unit)
    if not units:
        raise UserError("c3 replica encoding", "the model has no FSDP2 units", "call fully_shard first")
    return units


class EncodedReduceScatter(PlainReduceScatter):
    """FSDP2's reduce-scatter for one unit; announces the unit's next sum to the group of replicas."""

    def __init__(self, replicas: C3ProcessGroup, codec: str, feedback: bool) -> None:
        self.replicas, self.codec, self.feedback = replicas, codec, feedback
        self.residual: torch.Tensor | None = None
        self.sums = 0
        """Number of sums of this unit between the replicas."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Called for the unit's gradients and then for its shard of them, which the replicas sum."""
        if dtype != torch.float32 and self.codec != "none":
            todo = "set MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            raise UserError("c3 replica encoding", f"gradients are reduced in {dtype}", todo)
        tensor = torch.empty(*size, dtype=dtype, device=device)
        self.replicas.expect_encoded(tensor, self)
        return tensor

    def take_residual(self, like: torch.Tensor) -> torch.Tensor | None:
        self.sums += 1
        if not self.feedback:
            return None
        if self.residual is None or self.residual.numel() != like.numel():
            self.residual = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
        return self.residual
