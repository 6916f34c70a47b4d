"""Parallelize the code model over every axis of the mesh.

Order: pipeline stages, expert and tensor parallelism, the operations of a rank (its kernels, then tensor, context and
expert parallelism), compilation, and FSDP2 over dp_shard x cp, one unit per block, with dp_replicate copies (HSDP).
Ranks along dp_shard and cp share one sharding of the weights, so context parallelism needs no extra copies. Experts
that are split over ep of these ranks are sharded over the others.

spec/parallel_check.py rejects layouts that cannot work. Runs over any backend of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lakh.spec import Mesh, Run
from lakh.workloads.code.acceleration import BackendChoice, choose_ops
from lakh.workloads.code.model import CodeModel
from lakh.workloads.code.parallelism.context import context_parallel_ops
from lakh.workloads.code.parallelism.expert import expert_parallel_ops, shard_block, shard_experts
from lakh.workloads.code.parallelism.pipeline import Pipeline, split
from lakh.workloads.code.parallelism.tensor import shard_weights, tensor_parallel_ops

__all__ = ["ParallelGroups", "parallelise"]


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups of this rank, by axis; None where an axis has one rank."""

    fsdp: DeviceMesh | None = None
    """dp_shard x cp, under dp_replicate where there are copies."""
    tp: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    """ep, and tp where there is one: the ranks that split the experts of a layer."""
    expert_fsdp: DeviceMesh | None = None
    """The ranks of fsdp that hold the same experts."""
    cp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None


def parallelise(
    run: Run,
    mesh: Mesh,
    groups: ParallelGroups,
    build: Callable[[], CodeModel],
    *,
    bf16: bool,
    device: torch.device,
    on_choice: Callable[[BackendChoice], None] = lambda choice: None,
) -> nn.Module:
    """This rank's part of the model that `build` makes, with equal weights on every rank."""
    if groups.pp is None:
        chunks = [build()]
    else:
        chunks = split(build, schedule=mesh.pp_schedule, rank=dist.get_rank(groups.pp), ranks=mesh.pp)
    is_bf16 = bf16 or next(chunks[0].parameters()).dtype == torch.bfloat16
    tensor_parallel = mesh.tp if groups.tp is not None else 1
    ops, compilation, choices = choose_ops(
        run.model, run.train, bf16=is_bf16, tensor_parallel=tensor_parallel, device=device.type
    )
    if groups.tp is not None:
        ops = tensor_parallel_ops(ops, groups.tp)
    if groups.cp is not None:
        ops = context_parallel_ops(ops, groups.cp)
    if groups.experts is not None:
        ops = expert_parallel_ops(ops, groups.experts.get_group("ep"))
    # Every tensor-parallel rank computes the router of all tokens, and their gradients are summed.
    ops = replace(ops, balance_scale=1 / (run.accumulation(mesh.ranks, uneven=True) * tensor_parallel))
    is_exact, summed_ranks = run.train.reduce_dtype == "float64", 1 if groups.fsdp is None else groups.fsdp.size()
    if is_exact:
        ops = replace(ops, balance_scale=ops.balance_scale / summed_ranks)
    for model in chunks:
        model.dtype = torch.bfloat16 if bf16 else None
        if groups.experts is not None:
            shard_experts(model, groups.experts)
        if groups.tp is not None:
            shard_weights(model, groups.tp)
        if bf16 and run.adapter.rank and groups.fsdp is None:  # FSDP needs one type for all parameters of a block
            _freeze_in_bf16(model)
        model.to(device)
        if run.adapter.rank and groups.fsdp is None:
            for block in model.each_block():
                block.fuse_frozen(run.adapter.base_bits)
        model.set_ops(ops)
        model.compile_model(compilation)
        model.summed_ranks = summed_ranks if is_exact else None
        if groups.fsdp is not None:
            _shard(model, groups.fsdp, groups.expert_fsdp, bf16=bf16, is_exact=is_exact)
    for choice in choices:
        on_choice(choice)
    if groups.pp is None:
        return chunks[0]
    tokens = run.data.sequence
    return Pipeline(
        chunks,
        schedule=mesh.pp_schedule,
        group=groups.pp,
        micro_batches=run.accumulation(mesh.ranks),
        hidden_shape=(run.data.micro_batch, tokens // (mesh.cp * mesh.tp), run.model.width),
        token_shape=(run.data.micro_batch, tokens),
        device=device,
    )


def _freeze_in_bf16(model: CodeModel) -> None:
    """Frozen matrices in the type of the products: half the memory, and no conversion in each step."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.dim() >= 2:
            parameter.data = parameter.data.to(torch.bfloat16)


def _shard(model: CodeModel, mesh: DeviceMesh, expert_mesh: DeviceMesh | None, *, bf16: bool, is_exact: bool) -> None:
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if is_exact:
        policy = replace(policy, reduce_dtype=torch.float64)
    for block in model.each_block():
        if expert_mesh is None:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        else:
            shard_block(block, mesh, expert_mesh, policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if is_exact:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # a sum: the mean would round by the number of ranks
