"""Expert parallelism: the experts of a layer are split over ranks, and tokens travel to their experts and back.

Rank r of an expert-parallel group holds experts r E/ep to (r + 1) E/ep - 1. Each rank routes its own tokens, so router,
attention and shared experts work as without it:

    counts per expert -> all-to-all -> rows of x to the ranks of their experts -> all-to-all
    -> experts -> outputs back to the tokens -> all-to-all -> weighted sum per token

No row is padded: the sizes of the exchange are those of the routing, which the host reads once per layer. Choices with
a weight of 0 (`Experts.capacity`) are not sent.

Cost per layer and micro-batch: two exchanges forward and two backward, each of N K W values, of which (ep - 1) / ep
leave the rank if the routing is even. Ranks that hold the same experts shard them by FSDP; an expert's gradient already
has the tokens of all ranks of its group, and FSDP averages over the ranks that share it, so it is divided by ep here.

Shapes: N tokens, K experts of each, E experts of the layer, W width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard

from lakh.errors import UserError
from lakh.workloads.code.architectures import parameters
from lakh.workloads.code.model import Block, CodeModel
from lakh.workloads.code.ops import ModelOps

__all__ = ["ExpertExchange", "expert_parallel_ops", "shard_block", "shard_experts"]


def shard_experts(model: CodeModel, mesh: DeviceMesh) -> None:
    """Keep only this rank's experts, in place. The mesh has the axis ep, and tp where each expert is split, too."""
    table = parameters(model.spec)
    for name, parameter in list(model.named_parameters()):
        info = table.get(name)
        if info is None or not info.is_expert:  # not in the table: adapters
            continue
        dims = [0] if mesh.ndim == 1 else [0, info.shard_dim]
        weight, placements = parameter.detach(), list[Placement]()
        for axis, dim in enumerate(dims):
            assert dim is not None
            weight = weight.chunk(mesh.size(axis), dim)[mesh.get_local_rank(axis)]
            placements.append(Shard(dim))
        whole = DTensor.from_local(
            weight.contiguous(), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        module = model.get_submodule(name.removesuffix(".weight"))
        module.weight = nn.Parameter(whole, requires_grad=parameter.requires_grad)


def shard_block(block: Block, mesh: DeviceMesh, expert_mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> FSDPModule:
    """FSDP of a block over `mesh`, and of its experts over `expert_mesh`, the ranks that hold the same ones."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
    except ImportError:
        found = f"torch {torch.__version__} shards all weights of a block over the same ranks"
        raise UserError("mesh.ep", found, "install a newer torch, or set it to 1") from None
    if expert_mesh.ndim == 1:
        mesh_info = FSDPMeshInfo(expert_mesh, shard_mesh_dim=0)
    else:
        mesh_info = HSDPMeshInfo(expert_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    experts = {id(parameter) for parameter in block.parameters() if parameter.dim() == 3}

    def place(parameter: nn.Parameter) -> Any:
        if id(parameter) not in experts:
            return None
        assert isinstance(parameter, DTensor)
        num_local = parameter.to_local().shape[0]
        # Whole experts if they divide, else parts of each: only equal parts have a place in a checkpoint.
        return ShardPlacementResult(Shard(int(num_local % mesh_info.shard_mesh_size > 0)), mesh_info)

    return fully_shard(block, mesh=mesh, mp_policy=policy, shard_placement_fn=place)


def expert_parallel_ops(ops: ModelOps, group: dist.ProcessGroup) -> ModelOps:
    """These operations on this rank's experts and the tokens of the whole group."""
    # The sizes change with every micro-batch: compiled code would be traced again for each.
    return replace(ops, experts=torch.compiler.disable(ExpertExchange(ops, group).run))


class ExpertExchange:
    """`ModelOps.experts` for experts that are split over a group."""

    def __init__(self, ops: ModelOps, group: dist.ProcessGroup) -> None:
        self._experts, self._group, self._ranks = ops.experts, group, dist.get_world_size(group)

    def run(
        self,
        x_NW: Tensor,
        gate_up: Tensor,
        down: Tensor,
        index_NK: Tensor,
        weight_NK: Tensor,
        *,
        bias: Tensor | None = None,
    ) -> Tensor:
        """As run_experts, with the weights of this rank's experts and the numbers of all."""
        num_local, top_k = len(gate_up), index_NK.shape[1]
        count = num_local * self._ranks
        chosen = index_NK.where(weight_NK != 0, count).flatten()
        counts = torch.bincount(chosen, minlength=count + 1)[:count].view(self._ranks, num_local)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        sends, receives = torch.stack((counts.sum(1), arriving.sum(1))).tolist()
        order = chosen.argsort(stable=True)[: sum(sends)]
        rows = order // top_k
        x = _Exchange.apply(x_NW[rows], sends, receives, self._group)
        numbers = torch.arange(num_local, device=x.device).repeat(self._ranks)
        numbers = numbers.repeat_interleave(arriving.flatten(), output_size=sum(receives))
        weights = [_MeanGradient.apply(weight, self._ranks) for weight in (gate_up, down)]
        biases = {} if bias is None else {"bias": _MeanGradient.apply(bias, self._ranks)}
        if len(x):
            y = self._experts(x, *weights, numbers[:, None], weight_NK.new_ones(len(x), 1), **biases)
        else:  # without tokens the gradients are 0, and not missing: FSDP reduces them with those of other ranks
            y = x * sum(weight.sum() for weight in (*weights, *biases.values()))
        y = _Exchange.apply(y, receives, sends, self._group)
        y = y * weight_NK.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(x_NW).index_add(0, rows, y)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: `sends[r]` of them to rank r; backward sends the gradients the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes = receives, sends, group
        return _all_to_all(x, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _all_to_all(grads[0], *ctx.sizes), None, None, None


def _all_to_all(x: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
    result = x.new_empty(sum(receives), x.shape[1])
    dist.all_to_all_single(result, x.contiguous(), receives, sends, group=group)
    return result


class _MeanGradient(torch.autograd.Function):
    """A weight as it is, with a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / ctx.parts, None
