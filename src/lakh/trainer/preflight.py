"""Check and estimate a run before any rank starts. Independent of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lakh.errors import InfeasiblePlan, LakhError, UserError
from lakh.spec import Fault, Run
from lakh.spec.parallel_check import check_parallelism
from lakh.spec.placement import place_axes
from lakh.workloads.code.fp8_check import check_fp8_of_cluster

if TYPE_CHECKING:
    from lakh.planner.estimate import Estimate

__all__ = ["check_run", "estimate_run"]


def check_run(run: Run, ranks: int, faults: Sequence[str] = ()) -> None:
    """Raise for faults that cannot be parsed, a mesh that does not work, too little memory, and unsuitable data."""
    for fault in faults:
        Fault.parse(fault)
    check_parallelism(run, ranks)
    if run.workload == "dlrm":
        from lakh.workloads.dlrm.samples import open_samples

        open_samples(run.dlrm, run.seed)
        return
    from lakh.tokens.loading.stream import open_data

    _check_memory(run, ranks)
    open_data(run.data, run.model.vocab)


def estimate_run(run: Run, ranks: int) -> dict[str, Any]:
    """Placement, memory and step time of a run, by the planner. Raises InfeasiblePlan if the run does not fit."""
    from lakh.planner.estimate import estimate

    mesh = check_parallelism(run, ranks)
    if run.workload == "dlrm":
        todo = "estimate the sharding of its tables with: lakh dlrm plan"
        raise UserError("estimate", f"{run.name} is a recommendation model", todo)
    if run.train.fp8:
        check_fp8_of_cluster(run, mesh.tp)
    found = estimate(run, ranks)
    if not found.fits:
        raise _does_not_fit(run, ranks, found)
    placed = place_axes(run.mesh.resolve(ranks), run.cluster)
    return {
        "placement": [f"{axis.axis} over the {axis.tier}: {axis.reason}" for axis in placed],
        "memory_bytes_per_gpu": round(found.memory_bytes["total"]),
        "memory_limit_bytes": round(found.memory_bytes["limit"]),
        "step_s": found.step_s,
        "step_s_low": found.error_bar["low_s"],
        "step_s_high": found.error_bar["high_s"],
        "tok_per_s": found.tok_per_s,
        "mfu": found.mfu,
        "binds": found.binds,
        "notes": found.notes,
    }


def _check_memory(run: Run, ranks: int) -> None:
    """Weights, gradients and optimizer state are known exactly and must fit."""
    limit_GiB = run.cluster.gpu.memory_GiB
    states_GiB = run.memory_bytes(ranks)["states"] / 2**30
    if states_GiB <= limit_GiB:
        return
    from lakh.planner.estimate import estimate

    try:
        raise _does_not_fit(run, ranks, estimate(run, ranks))
    except InfeasiblePlan:
        raise
    except LakhError:  # the planner has no model of this cluster
        found = f"weights, gradients and optimizer state take {states_GiB:.1f} GiB of {limit_GiB:g} GiB on each rank"
        raise InfeasiblePlan("memory of one GPU", found, "use more GPUs, or a smaller model") from None


def _does_not_fit(run: Run, ranks: int, found: Estimate) -> InfeasiblePlan:
    """The error with the nearest settings that fit."""
    names = {"micro_batch": "data.micro_batch", "shard": "mesh.dp_shard", "recompute": "train.recompute"}
    names |= {axis: f"mesh.{axis}" for axis in ("tp", "pp", "cp")}
    change = dict(found.nearest["change"]) if found.nearest else {}
    sets = [f"--set {names[key]}={value}" for key, value in change.items() if key in names]
    if "shard" in change:
        sets.append(f"--set mesh.dp_replicate={run.mesh.resolve(ranks).data_ranks // int(change['shard'])}")
    todo = _fits_on_a_node(run, ranks) or "use more GPUs, or a smaller model"
    if found.nearest and sets:
        todo = f"the nearest that fits ({found.nearest['memory_bytes'] / 2**30:.1f} GiB): {' '.join(sets)}"
    limit_GiB = found.memory_bytes["limit"] / 2**30
    return InfeasiblePlan("memory of one GPU", f"{found.binds}; {limit_GiB:.1f} GiB are usable", todo)


def _fits_on_a_node(run: Run, ranks: int) -> str:
    """The advice to use all GPUs of a node, if the run fits there; else empty."""
    from lakh.planner.estimate import estimate

    node = run.cluster.node_size
    try:
        found = estimate(run, node) if node > ranks else None
    except LakhError:
        return ""
    if found is None or not found.fits:
        return ""
    return f"it fits on {node} GPUs ({found.memory_bytes['total'] / 2**30:.1f} GiB each): --nproc {node}"
