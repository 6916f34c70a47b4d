"""Tensor parallelism with sequence parallelism: each matrix, and between matrices each sequence, cut up over ranks.

Query, key, value, gate, up, embedding and head are cut by rows (of their output), output and down by columns. Between
the matrices a rank holds T / tp tokens of every sequence: norms and residuals are neither repeated nor kept whole. The
sequence is gathered before a pair of matrices and summed and scattered after it:

    x_BtW -> gather -> x_BTW -> qkv, attention, o (partial sums) -> sum and scatter -> y_BtW

Cost per block and micro-batch: two gathers and two scatters forward and as many backward, each of B T W (tp - 1) / tp
values. Weights are DTensors for their owners (FSDP, checkpoints, gradient norms); the arithmetic sees local tensors and
the collectives stand here, so it runs over any backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lakh.workloads.code.model import CodeModel, RMSNorm, local
from lakh.workloads.code.parallelism.collectives import Peers, gather, sum_and_scatter, sum_over

__all__ = ["cut_matrices"]


def cut_matrices(model: CodeModel, mesh: DeviceMesh) -> None:
    """Cut the model up in place over the ranks of a mesh of one axis. All of them hold equal weights before."""
    group = mesh.get_group()
    peers = Peers.of(group)
    rows: list[nn.Module] = []
    columns: list[nn.Module] = []
    if model.embed is not None:
        rows.append(model.embed)
        model.look_up = lambda tokens, weight: _look_up(tokens, weight, group)
    if model.head is not None:
        rows.append(model.head)
    model.head_group, model.parts = group, mesh.size()
    model.enter = lambda x: whole_sequence(x, peers)
    for block in model.each_block():
        attention, ffn = block.attention, block.ffn
        rows += [attention.q, attention.k, attention.v, ffn.gate, ffn.up]
        columns += [attention.o, ffn.down]
        block.enter = lambda x: whole_sequence(x, peers)
        block.leave = lambda x: summed_part(x, peers)
    for matrix in rows:
        _cut(matrix, mesh, Shard(0))
    for matrix in columns:
        _cut(matrix, mesh, Shard(1))
    for module in model.modules():
        if isinstance(module, RMSNorm):
            _cut(module, mesh, Replicate())
            module.read = lambda weight: shared_weight(local(weight), peers)


def _cut(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    weight = module.get_parameter("weight").detach()
    if isinstance(placement, Shard):
        weight = weight.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous()
    module.weight = nn.Parameter(DTensor.from_local(weight, mesh, [placement], run_check=False))


def _look_up(tokens_BT: Tensor, weight_vW: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank looks up the tokens that it has rows for; the sum over ranks is the embedding."""
    place = tokens_BT - dist.get_rank(group) * weight_vW.shape[0]
    is_here = (place >= 0) & (place < weight_vW.shape[0])
    x_BTW = F.embedding(place.where(is_here, 0), weight_vW) * is_here[..., None]
    return summed_part(x_BTW, Peers.of(group))


# --- collectives along the sequence, with their gradients ---

Collective = Callable[[Tensor, Peers], Tensor]


def _gather(x_BtW: Tensor, peers: Peers) -> Tensor:
    return torch.cat(gather(x_BtW, peers), dim=1)


def _sum_and_scatter(x_BTW: Tensor, peers: Peers) -> Tensor:
    return sum_and_scatter(x_BTW.chunk(peers.size, dim=1), peers)


def _keep(weight: Tensor, peers: Peers) -> Tensor:
    return weight.view_as(weight)


def _sum(grad: Tensor, peers: Peers) -> Tensor:
    return sum_over(grad, peers.name)


def _with_gradient(there: Collective, back: Collective) -> Collective:
    """`there`, whose gradient is made by `back`."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str, size: int) -> Tensor:
            ctx.name, ctx.size = name, size
            return there(x, Peers(name, size))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return back(grads[0], Peers(ctx.name, ctx.size)), None, None

    def call(x: Tensor, peers: Peers) -> Tensor:
        return Pair.apply(x, peers.name, peers.size)

    return call


whole_sequence = _with_gradient(_gather, _sum_and_scatter)
summed_part = _with_gradient(_sum_and_scatter, _gather)
shared_weight = _with_gradient(_keep, _sum)
"""A weight that every rank uses on other tokens: the same forward, summed backward."""
