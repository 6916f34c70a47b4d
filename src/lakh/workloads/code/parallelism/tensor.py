"""Tensor parallelism with sequence parallelism: matrices are sharded over ranks, and so are sequences between them.

Query, key, value, gate, up, embedding and head are column-parallel (sharded by output rows), output and down are
row-parallel (`ParameterInfo.shard_dim`). Between matrices a rank holds T / tp tokens of every sequence, so norms and
residuals are neither repeated nor stored whole:

    x_BtW -> all-gather -> x_BTW -> qkv, attention, o (partial sums) -> reduce-scatter -> y_BtW

Cost per block and micro-batch: two all-gathers and two reduce-scatters forward and as many backward, each of
B T W (tp - 1) / tp values. Parameters are DTensors (for FSDP, checkpoints, gradient norms); the computation uses local
tensors and the collectives below, so it runs over any backend.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lakh.workloads.code.architectures import parameters
from lakh.workloads.code.model import CodeModel
from lakh.workloads.code.ops import ModelOps, joint_norm_over, local
from lakh.workloads.code.parallelism.collectives import Peers, all_gather, all_reduce, reduce_scatter, with_gradient

__all__ = ["shard_weights", "tensor_parallel_ops"]


def shard_weights(model: CodeModel, mesh: DeviceMesh) -> None:
    """Shard the parameters in place over a mesh of one axis, except experts that expert parallelism has sharded. All
    ranks hold equal weights before."""
    table = parameters(model.spec)
    for name, parameter in list(model.named_parameters()):
        if isinstance(parameter, DTensor):
            continue
        dim = table[name].shard_dim
        placement: Placement = Replicate() if dim is None else Shard(dim)
        weight = parameter.detach()
        if dim is not None:
            weight = weight.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()
        module = model.get_submodule(name.removesuffix(".weight"))
        module.weight = nn.Parameter(DTensor.from_local(weight, mesh, [placement], run_check=False))


def tensor_parallel_ops(ops: ModelOps, mesh: DeviceMesh) -> ModelOps:
    """These operations on sharded weights and sequences."""
    group = mesh.get_group()
    peers = Peers.of(group)
    return replace(
        ops,
        embedding=lambda tokens, weight: _embedding(tokens, weight, group),
        enter=lambda x: whole_sequence(x, peers),
        leave=lambda x: summed_part(x, peers),
        joint_norm=joint_norm_over(mesh.size(), lambda x: shared_sum(x, peers)),
        norm_weight=lambda weight: shared_weight(local(weight), peers),
        vocab_group=group,
        tensor_parallel=mesh.size(),
    )


def _embedding(tokens_BT: Tensor, weight_vW: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank looks up the tokens of its part of the vocabulary; the sum over ranks is the embedding."""
    index = tokens_BT - dist.get_rank(group) * weight_vW.shape[0]
    is_here = (index >= 0) & (index < weight_vW.shape[0])
    x_BTW = F.embedding(index.where(is_here, 0), weight_vW) * is_here[..., None]
    return summed_part(x_BTW, Peers.of(group))


# --- collectives along the sequence, with their gradients ---


def _gather(x_BtW: Tensor, peers: Peers) -> Tensor:
    return torch.cat(all_gather(x_BtW, peers), dim=1)


def _reduce_scatter(x_BTW: Tensor, peers: Peers) -> Tensor:
    return reduce_scatter(x_BTW.chunk(peers.size, dim=1), peers)


whole_sequence = with_gradient(_gather, _reduce_scatter)
summed_part = with_gradient(_reduce_scatter, _gather)
shared_sum = with_gradient(lambda x, peers: all_reduce(x, peers.name), lambda grad, peers: all_reduce(grad, peers.name))
shared_weight = with_gradient(lambda x, peers: x.view_as(x), lambda grad, peers: all_reduce(grad, peers.name))
"""A weight that every rank applies to its own tokens: identity forward, all-reduce backward."""
