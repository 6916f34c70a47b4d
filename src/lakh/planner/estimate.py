"""Estimate of one execution plan: whether it fits, what limits it, step time, cost, and the error bar.

    estimate(run, gpus=None, cluster=None)     for a spec.Run: what `lakh train` would do
    estimate_plan(model, plan, cluster)        for any model and plan

A plan that does not fit is an answer too: `fits` is False, and `nearest` is the smallest change that fits. Errors are
only for impossible requests (more GPUs than the cluster has, a batch that does not divide).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from lakh.errors import InfeasiblePlan, UserError
from lakh.planner.calibration.error_bands import COVERAGE, ErrorBand, configuration_kind
from lakh.planner.calibration.fit import Calibration, calibration_for
from lakh.planner.calibration.program_factor import LAKH, OwnFactor, program_factor
from lakh.planner.cost.prices import GpuHour, cluster_price
from lakh.planner.execution_plan import FULL, ExecutionPlan, plan_of_run
from lakh.planner.memory import MemoryUse, memory_use
from lakh.planner.timing.data_parallel import HOST_Bps
from lakh.planner.timing.step_time import step_time
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model
from lakh.spec.run import Run

__all__ = ["USABLE_SHARE", "Estimate", "check_plan", "error_bar", "estimate", "estimate_plan", "nearest_that_fits"]

UNKNOWN_BAND = ErrorBand(low=0.7, high=1.5, rows=0)
USABLE_SHARE = 0.97  # of the memory: the driver uses some, and a run at 100 % fails on its first unusual batch
CHECKPOINT_BYTES = 14.0  # per parameter: bf16 weight, float32 master copy and moments
TOKEN_BYTES = 4.0
DEFAULT_CHECKPOINT_INTERVAL_S = 600.0


@dataclass(frozen=True)
class Estimate:
    fits: bool
    binds: str
    """What limits the plan: the largest user of memory when it does not fit, else the largest part of the step."""
    gpus: int
    step_s: float
    tflops_per_gpu: float
    """Model FLOP/s, causal-exact, without recomputation."""
    mfu: float
    mfu_palm: float
    """MFU with the whole score matrix counted, as in most public figures."""
    tok_per_s: float
    memory_bytes: dict[str, float]
    step_parts_s: dict[str, float]
    cost: dict[str, float]
    stalls: dict[str, float]
    """Outside the step: mean seconds that checkpoints and data loading add to each step."""
    error_bar: dict[str, Any]
    layout: dict[str, Any]
    nearest: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


def estimate(run: Run, gpus: int | None = None, cluster: Cluster | None = None) -> Estimate:
    """Estimate a lakh run on `gpus` GPUs (default: the mesh's) of a cluster (default: the run's)."""
    return estimate_plan(
        run.model,
        plan_of_run(run, gpus or run.mesh.ranks),
        cluster or run.cluster,
        tokens=float(run.tokens),
        checkpoint_every_steps=run.checkpoint.every or run.train.steps,
    )


def estimate_plan(
    model: Model,
    plan: ExecutionPlan,
    cluster: Cluster,
    *,
    tokens: float | None = None,
    checkpoint_every_steps: int | None = None,
    price: GpuHour | None = None,
    program: str = LAKH,
    own: dict[str, OwnFactor] | None = None,
) -> Estimate:
    """Estimate one plan; `tokens` is the length of the run, for its cost, `own` factors of lakh's trainer.

    Without `checkpoint_every_steps` a checkpoint every ten minutes is assumed.
    """
    check_plan(model, plan, cluster)
    gpu, price = cluster.gpu, price or cluster_price(cluster, free_if_unknown=True)
    calibration, basis = calibration_for(gpu.family)
    factor = program_factor(program, gpu.family, calibration, own)
    step = factor.apply(step_time(model, plan, cluster, calibration.efficiency))
    used = memory_use(model, plan)
    limit = gpu.memory_bytes * USABLE_SHARE
    step_s, gpus = float(step.total_s), float(plan.gpus)
    fits = float(used.total_bytes) <= limit
    parts = {f.name: float(getattr(step, f.name)) for f in fields(step)}
    step_tokens = float(plan.batch * plan.sequence)

    def flops_per_gpu(causal: bool) -> float:
        per_token = model.flops_per_token(plan.sequence, causal=causal, frozen=bool(plan.adapters))
        return step_tokens * per_token / step_s / gpus

    stalls = _stalls(model, plan, cluster, step_s, checkpoint_every_steps)
    notes = [f"time: {basis}", f"program {program}: {factor.basis}"]
    if gpu.peak_FLOPs < 1e13:
        notes.append("not a GPU cluster: the time is a rough guide, MFU has no meaning")
    return Estimate(
        fits=fits,
        binds=_binds(parts, used, fits),
        gpus=int(gpus),
        step_s=step_s,
        tflops_per_gpu=flops_per_gpu(True) / 1e12,
        mfu=flops_per_gpu(True) / gpu.peak_FLOPs,
        mfu_palm=flops_per_gpu(False) / gpu.peak_FLOPs,
        tok_per_s=step_tokens / step_s,
        memory_bytes={**_memory_parts(used), "total": float(used.total_bytes), "limit": limit},
        step_parts_s=parts,
        cost=_cost(step_s + sum(stalls.values()), step_tokens, gpus, tokens, price),
        stalls=stalls,
        error_bar=error_bar(step_s, calibration, basis, _kind(model, plan, cluster)),
        layout=plan.summary(),
        nearest=None if fits else nearest_that_fits(model, plan, cluster),
        notes=notes,
    )


def check_plan(model: Model, plan: ExecutionPlan, cluster: Cluster) -> None:
    """Refuse a plan whose sizes do not divide, naming the option."""
    gpus, batch, micro_batch = int(plan.gpus), int(plan.batch), int(plan.micro_batch)
    tp, pp, cp, ep, shard = (int(getattr(plan, axis)) for axis in ("tp", "pp", "cp", "ep", "shard"))
    if gpus > cluster.gpus:
        found = f"has {cluster.gpus:,} GPUs, {gpus:,} were requested"
        raise UserError(f"cluster {cluster.name}", found, "request fewer")
    group = tp * pp * cp
    if gpus % group:
        found = f"{gpus} is not a multiple of tp x pp x cp = {group}"
        raise InfeasiblePlan("--gpus", found, f"choose a multiple of {group}")
    ranks = gpus // group
    if batch % (ranks * micro_batch):
        found = f"{batch} sequences cannot be split over {ranks} data ranks x micro-batch {micro_batch}"
        raise InfeasiblePlan("--batch", found, f"choose a multiple of {ranks * micro_batch}")
    for option, size, number, what, todo in (
        ("--tp", tp, model.heads, f"{model.heads} heads", "choose another"),
        ("--ep", ep, max(model.num_experts, 1), f"{max(model.num_experts, 1)} experts", "choose another"),
        ("--ep", ep, ranks * cp * tp, f"the {ranks * cp * tp} ranks of a stage", "choose a divisor"),
        ("--shard", shard, ranks * cp, f"the {ranks * cp} data ranks", "choose a divisor"),
    ):
        if number % size:
            raise InfeasiblePlan(option, f"{size} does not divide {what}", todo)
    if pp > model.layers:
        raise InfeasiblePlan("--pp", f"{pp} stages for {model.layers} layers", "choose fewer stages")
    chunks, layers = int(plan.chunks), (model.layers // pp, -(-model.layers // pp))  # of a stage
    if chunks > 1 and (pp == 1 or all(number % chunks for number in layers)):
        found = f"{chunks} chunks do not divide the {layers[-1]} layers of a stage" if pp > 1 else "has no pipeline"
        choices = [n for n in range(2, layers[-1] + 1) if any(number % n == 0 for number in layers)]
        todo = f"choose one of {', '.join(map(str, choices))}" if pp > 1 and choices else "omit --chunks"
        raise InfeasiblePlan("--chunks", found, todo)


def nearest_that_fits(model: Model, plan: ExecutionPlan, cluster: Cluster) -> dict[str, Any] | None:
    """The smallest change that fits: recomputation and micro-batch first, then sharding, then model parallelism."""
    limit = cluster.gpu.memory_bytes * USABLE_SHARE
    before = plan.summary()
    for change in _changes(model, plan):
        other = replace(plan, **change)
        total = float(memory_use(model, other).total_bytes)
        if total <= limit:
            changed = {k: v for k, v in other.summary().items() if v != before.get(k)}
            return {"change": changed, "memory_bytes": total, "limit_bytes": limit}
    return None


def _changes(model: Model, plan: ExecutionPlan) -> list[dict[str, Any]]:
    data_ranks, largest = float(plan.data_ranks * plan.cp), int(plan.micro_batch)
    changes: list[dict[str, Any]] = []
    for recompute in (float(plan.recompute), float(FULL)):
        for size in (float(size) for size in range(largest, 0, -1) if largest % size == 0):
            base = {"recompute": recompute, "micro_batch": size}
            changes.append(base)
            if float(plan.weight_bytes) < 4:  # a program whose weights are their own master copy has FSDP only
                changes.append({**base, "zero": max(float(plan.zero), 1.0)})
                changes.append({**base, "zero": 2.0, "shard": 1.0})
                changes.append({**base, "zero": 2.0, "shard": 1.0, "chunks_ahead": 1.0})
            changes.append({**base, "shard": data_ranks, "zero": 0.0})
    smallest = {"micro_batch": 1.0, "recompute": float(FULL)}
    for factor in (2, 4, 8, 16, 32, 64):
        for axis, size, other in (("tp", model.heads, plan.pp), ("pp", model.layers, plan.tp)):
            ranks = float(getattr(plan, axis)) * factor
            group = ranks * float(other) * float(plan.cp)
            divides = float(plan.gpus) % group == 0 and size % ranks == 0
            if divides and float(plan.batch) % (float(plan.gpus) / group) == 0 and not (axis == "tp" and ranks > 16):
                changes.append({**smallest, "zero": max(float(plan.zero), 1.0), "shard": 1.0, axis: ranks})
    changes.append({**smallest, "shard": data_ranks, "zero": 0.0, "offload": 1.0})
    return changes


def _memory_parts(used: MemoryUse) -> dict[str, float]:
    return {f.name.removesuffix("_bytes"): float(getattr(used, f.name)) for f in fields(used)}


def _binds(parts: dict[str, float], used: MemoryUse, fits: bool) -> str:
    if fits:
        name, value = max(parts.items(), key=lambda item: item[1])
        return f"{name.removesuffix('_s')} ({value / sum(parts.values()):.0%} of the step)"
    name, size = max(_memory_parts(used).items(), key=lambda item: item[1])
    return f"memory: {float(used.total_bytes) / 2**30:.1f} GiB, most of it {name} ({size / 2**30:.1f} GiB)"


def _stalls(model: Model, plan: ExecutionPlan, cluster: Cluster, step_s: float, every: int | None) -> dict[str, float]:
    """A checkpoint is copied to host memory and written from there: the job waits for the copy, and for a write that
    takes longer than the interval. Data are read ahead: only storage that cannot keep up delays a step."""
    steps = every or max(round(DEFAULT_CHECKPOINT_INTERVAL_S / step_s), 1)
    size = 0.0 if plan.adapters else model.parameters * CHECKPOINT_BYTES  # adapters are small
    copy_s = size / float(plan.gpus) / HOST_Bps
    late_s = read_s = 0.0
    if cluster.storage_write_GBps:
        late_s = max(size / (cluster.storage_write_GBps * 1e9) - steps * step_s, 0.0)
    if cluster.storage_read_GBps:
        read_s = float(plan.batch * plan.sequence) * TOKEN_BYTES / (cluster.storage_read_GBps * 1e9)
    return {"checkpoint_s": (copy_s + late_s) / steps, "data_s": max(read_s - step_s, 0.0)}


def _cost(step_s: float, step_tokens: float, gpus: float, tokens: float | None, price: GpuHour) -> dict[str, float]:
    per_step = step_s * gpus / 3600 * price.usd
    cost = {
        "usd_per_gpu_hour": price.usd,
        "usd_per_step": per_step,
        "usd_per_million_tokens": per_step / step_tokens * 1e6,
    }
    if tokens:
        steps = tokens / step_tokens
        cost |= {"run_days": steps * step_s / 86400, "run_gpu_hours": steps * step_s * gpus / 3600}
        cost["run_usd"] = cost["run_gpu_hours"] * price.usd
    return cost


def _kind(model: Model, plan: ExecutionPlan, cluster: Cluster) -> str:
    return configuration_kind(model.num_experts, float(plan.low_precision), float(plan.gpus), cluster.node_size)


def error_bar(step_s: float, calibration: Calibration, basis: str, kind: str) -> dict[str, Any]:
    """The conformal band of this GPU type and kind of configuration; a wide guess without measurements."""
    error, band = calibration.error, calibration.bands.get(kind, UNKNOWN_BAND)
    bar = {"low_s": step_s * band.low, "high_s": step_s * band.high, "covers": COVERAGE, "basis": basis}
    bar |= {"kind": kind, "rows": band.rows}
    if error:
        bar |= {"heldout_n": int(error["n"]), "heldout_mape": error["mape"], "heldout_median_ape": error["median_ape"]}
    return bar
