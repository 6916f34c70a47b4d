"""Cutting the code model up over ranks: FSDP2, one unit per block.

So far the data-parallel axes of the mesh: `dp_shard` alone is FSDP, together with `dp_replicate` it is HSDP (shards
inside a group, gradients averaged between groups). Other axes are refused with the reason.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lakh.errors import InfeasiblePlan
from lakh.spec import Mesh
from lakh.workloads.code.model import CodeModel

__all__ = ["check_supported", "shard"]


def check_supported(mesh: Mesh) -> None:
    for axis in ("tp", "pp", "cp", "ep"):
        if getattr(mesh, axis) > 1:
            raise InfeasiblePlan(
                f"mesh.{axis}",
                f"is {getattr(mesh, axis)} and the trainer cuts only along dp_shard and dp_replicate",
                f"set mesh.{axis} = 1",
            )


def shard(model: CodeModel, device_mesh: DeviceMesh, *, bf16: bool) -> None:
    """Turn the model's parameters into shards in place. Call on every rank, with equal weights on all of them."""
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=device_mesh, mp_policy=policy)
    fully_shard(model, mesh=device_mesh, mp_policy=policy)
