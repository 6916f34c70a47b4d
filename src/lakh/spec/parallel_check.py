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


def check_parallelism(run: Run, world: int, *, uneven: bool = False) -> Mesh:
    """The mesh for this many ranks; raises InfeasiblePlan where the trainer would fail or be silently wrong.

    `uneven`: ranks were lost, and the replicas need not have equally many micro-batches.
    """
    mesh = run.mesh.resolve(world)
    if run.workload == "dlrm":
        return _check_recommender(run, mesh)
    run.model.require_trainable()
    accumulation = run.accumulation(world, uneven=uneven)
    tokens = run.data.sequence // mesh.cp
    if tokens % mesh.tp:
        found = f"{mesh.tp} tensor-parallel ranks do not divide sequences of {tokens} tokens"
        raise InfeasiblePlan("mesh.tp", found, "choose a divisor")
    if mesh.ep > 1:
        _check_experts(run, mesh)
    if run.model.experts is not None and run.model.experts.capacity and mesh.cp > 1:
        found = f"bounds the tokens of a micro-batch, of which each of {mesh.cp} context-parallel ranks sees a part"
        raise InfeasiblePlan("model.experts.capacity", found, "set it to 0, or mesh.cp to 1")
    if run.adapter.rank and mesh.tp * mesh.pp > 1:
        found = f"adapters are trained with data and context parallelism; tp is {mesh.tp} and pp is {mesh.pp}"
        raise InfeasiblePlan("adapter.rank", found, "set mesh.tp and mesh.pp to 1")
    if run.adapter.rank and run.adapter.base_bits == 4 and world > 1:
        found = f"is 4 on {world} ranks: sharded weights are not quantized"
        raise InfeasiblePlan("adapter.base_bits", found, "use one rank, or 16 bits")
    if run.preference.beta and mesh.tp * mesh.pp * mesh.cp > 1:
        found = f"pairs of answers are trained with data parallelism; tp is {mesh.tp}, pp {mesh.pp} and cp {mesh.cp}"
        raise InfeasiblePlan("preference.beta", found, "set mesh.tp, mesh.pp and mesh.cp to 1")
    if mesh.pp > 1:
        _check_pipeline(run, mesh, accumulation)
    if run.train.compile == "model" and world > 1:
        found = f"{world} ranks communicate between blocks, which one graph of all blocks does not allow"
        raise InfeasiblePlan("train.compile", found, 'set train.compile = "block"')
    if run.train.replica_codec != "none" and run.train.backend != "c3":
        found = f"{run.train.replica_codec} needs train.backend = c3, which is {run.train.backend}"
        raise InfeasiblePlan("train.replica_codec", found, 'set train.backend = "c3", or train.replica_codec = "none"')
    _check_reduce_dtype(run, mesh)
    return mesh


def _check_reduce_dtype(run: Run, mesh: Mesh) -> None:
    if run.train.reduce_dtype == "float32":
        return
    reasons = {
        "a pipeline adds the gradients of its micro-batches itself": mesh.pp > 1,
        "gradients of split experts are added by their own ranks": mesh.ep > 1,
        f"train.replica_codec = {run.train.replica_codec} rounds what replicas exchange": run.train.replica_codec
        != "none",
        "recommendation models add gradients by rows": run.workload == "dlrm",
    }
    for found in (reason for reason, applies in reasons.items() if applies):
        raise InfeasiblePlan("train.reduce_dtype = float64", found, 'set train.reduce_dtype = "float32"')


def _check_experts(run: Run, mesh: Mesh) -> None:
    experts, sharding = run.model.experts, mesh.dp_shard * mesh.cp
    assert experts is not None  # Mesh.check
    if sharding % mesh.ep:
        found = f"{mesh.ep} does not divide the {sharding} ranks of dp_shard x cp, over which experts are split"
        raise InfeasiblePlan("mesh.ep", found, "choose a divisor")
    shards = mesh.expert_shards
    if experts.count // mesh.ep % shards and (experts.ffn // mesh.tp % shards or run.model.width % shards):
        found = (
            f"{shards} ranks share {experts.count // mesh.ep} experts and divide neither their number nor their size"
        )
        raise InfeasiblePlan("mesh.ep", found, "choose another")
    if run.train.replica_codec != "none":
        found = f"{run.train.replica_codec} encodes blocks that have one group of replicas, and experts have their own"
        raise InfeasiblePlan("train.replica_codec", found, 'set it to "none", or mesh.ep to 1')


def _check_recommender(run: Run, mesh: Mesh) -> Mesh:
    """Tables are sharded over all ranks (dlrm.sharding); each rank reads other samples."""
    run.accumulation(mesh.ranks)
    for axis in ("tp", "pp", "cp", "ep"):
        if getattr(mesh, axis) > 1:
            found = f"is {getattr(mesh, axis)}, and a recommendation model is sharded by its tables (dlrm.sharding)"
            raise InfeasiblePlan(f"mesh.{axis}", found, "set it to 1")
    if mesh.dp_replicate > 1 and mesh.dp_shard > 1:
        found = f"{mesh.dp_replicate} replicas of {mesh.dp_shard} ranks: replicas of sharded tables are not supported"
        raise InfeasiblePlan("mesh.dp_replicate", found, "set it to 1, or to the number of ranks")
    _check_reduce_dtype(run, mesh)
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
