"""Checks that the trainer supports a run's parallelism on a number of ranks.

`Mesh` itself refuses sizes that do not divide. This module refuses combinations at which the trainer would fail or,
worse, compute wrong gradients silently. Plans, launchers and ranks all call it before anything starts.
"""

from __future__ import annotations

from lakh.errors import InfeasiblePlan
from lakh.spec.mesh import Mesh
from lakh.spec.run import Run

__all__ = ["STAGES_PER_RANK", "check_parallelism"]

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2}
"""Pipeline stages (consecutive blocks) on each rank, by schedule."""


def check_parallelism(run: Run, world: int) -> Mesh:
    """The mesh for this many ranks; raises InfeasiblePlan where the trainer would fail or be silently wrong."""
    run.model.require_trainable()
    mesh = run.mesh.resolve(world)
    accumulation = run.accumulation(world)
    tokens = run.data.sequence // mesh.cp
    if tokens % mesh.tp:
        found = f"{mesh.tp} tensor-parallel ranks do not divide sequences of {tokens} tokens"
        raise InfeasiblePlan("mesh.tp", found, "choose a divisor")
    if mesh.ep > 1:
        raise InfeasiblePlan("mesh.ep", f"is {mesh.ep}: expert parallelism is planned and not trained", "set it to 1")
    if mesh.pp > 1:
        _check_pipeline(run, mesh, accumulation)
    if run.train.compile == "model" and world > 1:
        found = f"{world} ranks communicate between blocks, which one graph of all blocks does not allow"
        raise InfeasiblePlan("train.compile", found, 'set train.compile = "block"')
    if run.train.replica_codec != "none" and run.train.backend != "c3":
        found = f"{run.train.replica_codec} needs train.backend = c3, which is {run.train.backend}"
        raise InfeasiblePlan("train.replica_codec", found, 'set train.backend = "c3", or train.replica_codec = "none"')
    return mesh


def _check_pipeline(run: Run, mesh: Mesh, accumulation: int) -> None:
    schedule = mesh.pp_schedule
    if run.model.tied:
        found = "the embedding is on the first stage and the head on the last, and model.tied makes them one matrix"
        raise InfeasiblePlan("mesh.pp", found, "set model.tied = false, or mesh.pp = 1")
    data_parallel = mesh.dp_replicate * mesh.dp_shard * mesh.cp
    if schedule == "zero_bubble" and data_parallel > 1:
        found = f"zero_bubble with {data_parallel} data-parallel ranks gives wrong gradients without an error"
        found += ": its split backward bypasses FSDP's reduction"
        raise InfeasiblePlan("mesh.pp_schedule", found, "choose interleaved or 1f1b")
    stages = mesh.pp * STAGES_PER_RANK[schedule]
    if run.model.layers % stages:
        found = f"{stages} stages ({schedule}) do not divide model.layers {run.model.layers}"
        raise InfeasiblePlan("mesh.pp", found, "choose another")
    if accumulation < mesh.pp or (STAGES_PER_RANK[schedule] > 1 and accumulation % mesh.pp):
        need = f"a multiple of {mesh.pp}" if STAGES_PER_RANK[schedule] > 1 else f"at least {mesh.pp}"
        found = (
            f"a step has {accumulation} micro-batches on each rank and {schedule} over {mesh.pp} stages needs {need}"
        )
        raise InfeasiblePlan("data.micro_batch", found, "make data.batch larger or data.micro_batch smaller")
