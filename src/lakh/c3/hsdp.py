"""Fewer bits between the copies of hybrid sharding (FSDP2 on a mesh of replicas x shards).

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))     # over backend "c3"
    fully_shard(model, mesh=mesh)
    encode_replicas(model, mesh.get_group("replicate"), "int4")

Each unit of FSDP2 adds its gradients up inside a copy, in full, and then between the copies: only that second sum, the
one on the slow tier, is encoded. What the codec loses of a unit is added to the same unit's gradients at the next step
(the residual, as large as a rank's shard of the gradients; not saved in checkpoints, zero after a resume). Other sums
over the same group (a loss, a norm) are not touched.

Which unit a sum belongs to is known because FSDP2 lets each unit bring its own reduce-scatter, and that one also makes
the tensor that is then summed between the copies. Fails with UserError where gradients are not reduced in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from lakh.c3.fsdp import Scatter
from lakh.c3.torch_backend import C3ProcessGroup
from lakh.errors import UserError
from lakh.spec.collectives import codec_bytes

__all__ = ["UnitGradients", "encode_replicas"]


def encode_replicas(
    model: torch.nn.Module, group: Any, codec: str = "int4", *, feedback: bool = True
) -> list[UnitGradients]:
    """Encode what the FSDP2 units of `model` sum over `group`, the copies; one state for each unit is returned."""
    if not isinstance(group, C3ProcessGroup):
        raise UserError("c3, copies", f"the group is a {type(group).__name__}", 'make the mesh over backend="c3"')
    codec_bytes(codec, 0)  # refuses an unknown one
    units = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            unit = UnitGradients(group, codec, feedback)
            module.set_custom_reduce_scatter(unit)  # type: ignore[arg-type]
            units.append(unit)
    if not units:
        raise UserError("c3, copies", "the model has no FSDP2 units", "call fully_shard first")
    return units


class UnitGradients(Scatter):
    """FSDP2's reduce-scatter for one unit, which also tells the group of copies whose sum comes next."""

    def __init__(self, copies: C3ProcessGroup, codec: str, feedback: bool) -> None:
        self.copies, self.codec, self.feedback = copies, codec, feedback
        self.residual: torch.Tensor | None = None
        self.sums = 0
        """How often this unit was summed between the copies."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The unit's gradients, and then its shard of them: the last one made is what the copies sum."""
        if dtype != torch.float32 and self.codec != "none":
            todo = "set MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            raise UserError("c3, copies", f"gradients are reduced in {dtype}", todo)
        made = torch.empty(*size, dtype=dtype, device=device)
        self.copies.expect_encoded(made, self)
        return made

    def take_residual(self, like: torch.Tensor) -> torch.Tensor | None:
        self.sums += 1
        if not self.feedback:
            return None
        if self.residual is None or self.residual.numel() != like.numel():
            self.residual = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
        return self.residual
