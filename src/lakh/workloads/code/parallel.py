"""Cutting the code model up over ranks along every axis of the mesh, and refusing what would go wrong.

In this order: pipeline stages (pipeline.py), matrices (tensor.py), sequences (context.py), then what makes each rank
fast (compiling.py), then FSDP2 over dp_shard x cp, one unit per block; with dp_replicate copies of that (HSDP). Ranks
along dp_shard and cp share one cut of the weights, so context parallelism costs no memory for copies.

`check` is pure and says what it refuses and why. Works over any backend of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lakh.errors import InfeasiblePlan
from lakh.spec import Mesh, Run
from lakh.workloads.code.compiling import Choice, speed_up
from lakh.workloads.code.context import cut_sequences
from lakh.workloads.code.model import CodeModel
from lakh.workloads.code.pipeline import CHUNKS, Pipeline, split
from lakh.workloads.code.tensor import cut_matrices

__all__ = ["Groups", "check", "parallelise"]


@dataclass(frozen=True)
class Groups:
    """The ranks that this one works with, axis by axis; None where an axis has one rank."""

    fsdp: DeviceMesh | None = None
    """dp_shard x cp, under dp_replicate where there are copies."""
    tp: DeviceMesh | None = None
    cp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None


def check(run: Run, world: int) -> Mesh:
    """The mesh for this many ranks; an InfeasiblePlan where the trainer would fail or, worse, be silently wrong."""
    run.model.require_plain()
    mesh = run.mesh.resolve(world)
    accumulation = run.accumulation(world)
    if mesh.tp > 1 and (run.data.sequence // mesh.cp) % mesh.tp:
        part = run.data.sequence // mesh.cp
        raise InfeasiblePlan(
            "mesh.tp", f"{mesh.tp} ranks share sequences of {part} tokens, which it does not divide", "choose a divisor"
        )
    if mesh.pp > 1:
        _check_pipeline(run, mesh, accumulation)
    if run.train.compile == "model" and world > 1:
        raise InfeasiblePlan(
            "train.compile",
            f"{world} ranks gather and hand on between blocks, and one graph of all blocks leaves no place for it",
            'set train.compile = "block"',
        )
    if run.train.replica_codec != "none" and run.train.backend != "c3":
        found = f"{run.train.replica_codec} needs train.backend = c3, which is {run.train.backend}"
        raise InfeasiblePlan("train.replica_codec", found, 'set train.backend = "c3", or train.replica_codec = "none"')
    return mesh


def _check_pipeline(run: Run, mesh: Mesh, accumulation: int) -> None:
    schedule = mesh.pp_schedule
    if run.model.tied:
        raise InfeasiblePlan(
            "mesh.pp",
            "the embedding is on the first stage and the head on the last, and model.tied makes them one matrix",
            "set model.tied = false, or mesh.pp = 1",
        )
    data_parallel = mesh.dp_replicate * mesh.dp_shard * mesh.cp
    if schedule == "zero_bubble" and data_parallel > 1:
        raise InfeasiblePlan(
            "mesh.pp_schedule",
            f"zero_bubble with {data_parallel} data-parallel ranks gives wrong gradients without an error: its split "
            "backward passes by FSDP's reduction",
            "choose interleaved or 1f1b",
        )
    stages = mesh.pp * CHUNKS[schedule]
    if run.model.layers % stages:
        raise InfeasiblePlan(
            "mesh.pp", f"{stages} stages ({schedule}) do not divide model.layers {run.model.layers}", "choose another"
        )
    if accumulation < mesh.pp or (CHUNKS[schedule] > 1 and accumulation % mesh.pp):
        need = f"a multiple of {mesh.pp}" if CHUNKS[schedule] > 1 else f"at least {mesh.pp}"
        raise InfeasiblePlan(
            "data.micro_batch",
            f"a step has {accumulation} micro-batches on each rank and {schedule} over {mesh.pp} stages needs {need}",
            "make data.batch larger or data.micro_batch smaller",
        )


def parallelise(
    run: Run,
    mesh: Mesh,
    groups: Groups,
    build: Callable[[], CodeModel],
    *,
    bf16: bool,
    device: torch.device,
    say: Callable[[Choice], None] = lambda choice: None,
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
