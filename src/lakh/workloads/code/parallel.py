"""Cutting the code model up over ranks along every axis of the mesh.

In this order: pipeline stages (pipeline.py), matrices (tensor.py), sequences (context.py), then what makes each rank
fast (compiling.py), then FSDP2 over dp_shard x cp, one unit per block; with dp_replicate copies of that (HSDP). Ranks
along dp_shard and cp share one cut of the weights, so context parallelism costs no memory for copies.

What would go wrong is refused before (`check`, spec/cuts.py). Works over any backend of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lakh.spec import Mesh, Run
from lakh.spec.cuts import check
from lakh.workloads.code.acceleration import BackendChoice, speed_up
from lakh.workloads.code.model import CodeModel
from lakh.workloads.code.parallelism.context import cut_sequences
from lakh.workloads.code.parallelism.pipeline import Pipeline, split
from lakh.workloads.code.parallelism.tensor import cut_matrices

__all__ = ["ParallelGroups", "check", "parallelise"]


@dataclass(frozen=True)
class ParallelGroups:
    """The ranks that this one works with, axis by axis; None where an axis has one rank."""

    fsdp: DeviceMesh | None = None
    """dp_shard x cp, under dp_replicate where there are copies."""
    tp: DeviceMesh | None = None
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
    say: Callable[[BackendChoice], None] = lambda choice: None,
) -> nn.Module:
    """The part of the model that this rank trains; what was chosen for it goes to `say`.

    `build` makes the whole model, with equal weights on every rank.
    """
    if groups.pp is None:
        chunks = [build()]
    else:
        rank = dist.get_rank(groups.pp)
        layers = run.model.layers
        chunks = split(build, layers=layers, schedule=mesh.pp_schedule, rank=rank, ranks=mesh.pp)
    for model in chunks:
        model.dtype = torch.bfloat16 if bf16 else None
        if groups.tp is not None:
            cut_matrices(model, groups.tp)
        model.to(device)
        chosen = speed_up(
            model,
            attention=run.train.attention,
            recomputation=run.train.recompute,
            compilation=run.train.compile,
            products=run.train.products,
            tokens=run.data.micro_batch * run.data.sequence // mesh.cp,
            run_flops=run.flops / mesh.ranks,
            fp8=run.train.fp8,
            device=device.type,
        )
        if groups.cp is not None:
            cut_sequences(model, groups.cp)  # after the choice of a kernel, which it replaces
        if groups.fsdp is not None:
            _shard(model, groups.fsdp, bf16=bf16)
    for choice in chosen:
        say(choice)
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


def _shard(model: CodeModel, mesh: DeviceMesh, *, bf16: bool) -> None:
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.each_block():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
