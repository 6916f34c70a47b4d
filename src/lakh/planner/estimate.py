"""One answer about one run: does it fit, what binds, how long is a step, what does it cost, and how sure are we.

    estimate(run, gpus=None, cluster=None)     for a spec.Run: what `lakh train` would do
    estimate_layout(shape, layout, cluster)    for any model and layout

A layout that cannot work is an answer here too: `fits` is False, and `nearest` says what would fit. Errors are only
for questions that make no sense (more GPUs than there are, a batch that does not divide).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from lakh.errors import InfeasiblePlan, UserError
from lakh.planner.calibration import Calibrated, calibrated
from lakh.planner.hardware import Hardware, hardware_of
from lakh.planner.layout import FULL, GRAPHS, RECOMPUTE, Layout
from lakh.planner.memory import Memory, memory
from lakh.planner.prices import GpuHour, gpu_hour, load_prices
from lakh.planner.shape import Shape, shape_of
from lakh.planner.steptime import step_time
from lakh.spec.cluster import Cluster
from lakh.spec.run import Run

__all__ = [
    "USABLE_SHARE",
    "Estimate",
    "check_layout",
    "describe",
    "error_bar",
    "estimate",
    "estimate_layout",
    "layout_of",
    "nearest_that_fits",
]

USABLE_SHARE = 0.97  # of the memory: the driver keeps some, and a run at 100 % dies on its first odd batch


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
    """The same with the whole score matrix counted, as most public figures do."""
    tok_per_s: float
    memory_bytes: dict[str, float]
    step_parts_s: dict[str, float]
    cost: dict[str, float]
    stalls: dict[str, float]
    """Outside the step: what a checkpoint and the reading of data add to each, on average."""
    error_bar: dict[str, Any]
    layout: dict[str, Any]
    nearest: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


def estimate(run: Run, gpus: int | None = None, cluster: Cluster | None = None) -> Estimate:
    """What one step of a lakh run takes on so many GPUs (default: the mesh's) of a cluster (default: the run's)."""
    place = cluster or run.cluster
    world = gpus or run.mesh.ranks
    every = run.checkpoint.every or run.train.steps
    return estimate_layout(
        shape_of(run.model), layout_of(run, world), place, tokens=float(run.tokens), checkpoint_every_steps=every
    )


# Chunks per stage, and chunks ahead, of the trainer's pipeline schedules (torch.distributed.pipelining).
TRAINER_CHUNKS = {"1f1b": (1.0, 2.0), "gpipe": (1.0, 2.0), "interleaved": (2.0, 2.0), "zero_bubble": (2.0, 1.0)}


def layout_of(run: Run, world: int) -> Layout:
    """How the trainer lays a run out: FSDP2 over dp_shard (and cp), float32 master weights, bf16 products."""
    run.accumulation(world)  # refuses a batch that does not divide, with the reason
    mesh = run.mesh.resolve(world)
    shard = mesh.dp_shard * mesh.cp
    recompute = run.train.recompute
    schedule = mesh.pp_schedule if mesh.pp > 1 else "1f1b"
    chunks, run_ahead = TRAINER_CHUNKS[schedule]
    moments = 8.0 if run.optim.kind == "adamw" else 4.0  # beside float32 weights that are their own master copy
    return Layout(
        gpus=float(world),
        sequence=float(run.data.sequence),
        batch=float(run.data.batch),
        micro_batch=float(run.data.micro_batch),
        tp=float(mesh.tp),
        pp=float(mesh.pp),
        cp=float(mesh.cp),
        ep=float(mesh.ep),
        shard=float(shard),
        chunks=chunks,
        run_ahead=run_ahead,
        gpipe=float(schedule == "gpipe"),
        zero_bubble=float(schedule == "zero_bubble"),
        low_precision=float(run.train.fp8),
        recompute=float(RECOMPUTE.index(recompute) if recompute in RECOMPUTE else FULL if recompute != "none" else 0),
        sequence_parallel=float(mesh.tp > 1),
        eager=float(run.train.compile == "none"),
        native_attention=float(run.train.attention in ("auto", "cudnn")),
        pp_inside=float(mesh.dp_replicate > 1),
        gradient_bytes=4.0,
        weight_bytes=4.0,
        optimizer_bytes=moments,
    )


def estimate_layout(
    shape: Shape,
    layout: Layout,
    cluster: Cluster,
    *,
    tokens: float | None = None,
    checkpoint_every_steps: int | None = None,
    price: GpuHour | None = None,
    found: Calibrated | None = None,
) -> Estimate:
    """The whole answer for one layout; `tokens` is the length of the run, for its cost.

    Without `checkpoint_every_steps` a checkpoint every ten minutes is assumed.
    """
    hw = hardware_of(cluster)
    check_layout(shape, layout, cluster)
    known, basis = (found, "as given") if found else calibrated(hw.kind)
    step = step_time(shape, layout, hw, known.fractions)
    used = memory(shape, layout)
    limit = float(hw.memory_bytes) * USABLE_SHARE
    step_s = float(step.total_s)
    fits = float(used.total_bytes) <= limit
    parts = {f.name: float(getattr(step, f.name)) for f in fields(step)}
    step_tokens = float(layout.batch * layout.sequence)
    gpus = float(layout.gpus)

    def rate(causal: bool) -> float:
        return (
            step_tokens
            * float(shape.flops_per_token(layout.sequence, causal=causal, frozen=layout.adapters))
            / step_s
            / gpus
        )

    stalls = _stalls(shape, layout, hw, cluster, step_s, checkpoint_every_steps)
    notes = [f"time: {basis}"]
    if float(hw.peak_FLOPs) < 1e13:
        notes.append("this cluster is no GPU cluster: the time is a rough guide, MFU means nothing")
    return Estimate(
        fits=fits,
        binds=_binds(parts, used, fits),
        gpus=int(gpus),
        step_s=step_s,
        tflops_per_gpu=rate(True) / 1e12,
        mfu=rate(True) / float(hw.peak_FLOPs),
        mfu_palm=rate(False) / float(hw.peak_FLOPs),
        tok_per_s=step_tokens / step_s,
        memory_bytes=_memory_table(used, limit),
        step_parts_s=parts,
        cost=_cost(step_s, sum(stalls.values()), step_tokens, gpus, tokens, price or _book_price(hw, cluster)),
        stalls=stalls,
        error_bar=error_bar(step_s, known, basis),
        layout=describe(layout),
        nearest=None if fits else nearest_that_fits(shape, layout, hw),
        notes=notes,
    )


def check_layout(shape: Shape, layout: Layout, cluster: Cluster) -> None:
    """Refuse what cannot be laid out at all, naming the number that binds."""
    lo, gpus = layout, int(layout.gpus)
    if gpus > cluster.gpus:
        raise UserError(
            f"cluster {cluster.name}", f"has {cluster.gpus:,} GPUs and {gpus:,} are asked for", "ask for fewer"
        )
    group = int(lo.tp * lo.pp * lo.cp)
    if gpus % group:
        raise InfeasiblePlan(
            "--gpus", f"{gpus} is no multiple of tp x pp x cp = {group}", f"choose a multiple of {group}"
        )
    ranks = gpus // group
    if int(lo.batch) % (ranks * int(lo.micro_batch)):
        raise InfeasiblePlan(
            "--batch",
            f"{int(lo.batch)} sequences cannot be split over {ranks} data ranks x micro-batch {int(lo.micro_batch)}",
            f"choose a multiple of {ranks * int(lo.micro_batch)}",
        )
    for axis, size, what in (("tp", shape.heads, "heads"), ("ep", np.maximum(shape.experts, 1), "experts")):
        if int(size) % int(getattr(lo, axis)):
            found = f"{int(getattr(lo, axis))} does not divide {int(size)} {what}"
            raise InfeasiblePlan(f"--{axis}", found, "choose another")
    holders = ranks * int(lo.cp) * int(lo.tp)
    if holders % int(lo.ep):
        found = f"{int(lo.ep)} does not divide the {holders} ranks of a stage"
        raise InfeasiblePlan("--ep", found, "choose a divisor")
    if int(lo.pp) > int(shape.layers):
        raise InfeasiblePlan("--pp", f"{int(lo.pp)} stages for {int(shape.layers)} layers", "choose fewer stages")
    if (ranks * int(lo.cp)) % int(lo.shard):
        raise InfeasiblePlan(
            "--shard", f"{int(lo.shard)} does not divide the {ranks * int(lo.cp)} data ranks", "choose a divisor"
        )


def nearest_that_fits(shape: Shape, layout: Layout, hw: Hardware) -> dict[str, Any] | None:
    """The smallest change that fits: recomputation and micro-batch first, then sharding, then model parallelism."""
    limit = float(hw.memory_bytes) * USABLE_SHARE
    data, most = float(layout.data_ranks * layout.cp), int(layout.micro_batch)
    changes: list[dict[str, Any]] = []
    for recompute in (float(layout.recompute), float(FULL)):
        for size in (float(size) for size in range(most, 0, -1) if most % size == 0):
            base = {"recompute": recompute, "micro_batch": size}
            changes.append(base)
            if float(layout.weight_bytes) < 4:  # a program whose weights are their own master copy has FSDP only
                changes.append({**base, "zero1": 1.0})
                changes.append({**base, "zero1": 1.0, "zero2": 1.0, "shard": 1.0})
                changes.append({**base, "zero1": 1.0, "zero2": 1.0, "shard": 1.0, "run_ahead": 1.0})
            changes.append({**base, "shard": data, "zero1": 0.0, "zero2": 0.0})
    for grow in (2, 4, 8, 16, 32, 64):
        for axis in ("tp", "pp"):
            ranks = float(getattr(layout, axis)) * grow
            size = float(shape.heads if axis == "tp" else shape.layers)
            others = {"micro_batch": 1.0, "recompute": float(FULL), "zero1": 1.0, "shard": 1.0, axis: ranks}
            group = ranks * float(layout.pp if axis == "tp" else layout.tp) * float(layout.cp)
            divides = float(layout.gpus) % group == 0 and size % ranks == 0
            if (
                divides
                and float(layout.batch) % (float(layout.gpus) / group) == 0
                and not (axis == "tp" and ranks > 16)
            ):
                changes.append(others)
    changes.append({"micro_batch": 1.0, "recompute": float(FULL), "shard": data, "zero1": 0.0, "zero2": 0.0,
                    "offload": 1.0})  # fmt: skip
    for change in changes:
        other = replace(layout, **change)
        total = float(memory(shape, other).total_bytes)
        if total <= limit:
            changed = {k: v for k, v in describe(other).items() if v != describe(layout).get(k)}
            return {"change": changed, "memory_bytes": total, "limit_bytes": limit}
    return None


def describe(layout: Layout) -> dict[str, Any]:
    """A layout in the words of the command line."""
    lo = layout
    return {
        "tp": int(lo.tp),
        "pp": int(lo.pp),
        "cp": int(lo.cp),
        "ep": int(lo.ep),
        "dp": int(lo.data_ranks),
        "shard": int(lo.shard),
        "micro_batch": int(lo.micro_batch),
        "micro_batches": int(lo.micro_batches),
        "chunks": int(lo.chunks),
        "recompute": RECOMPUTE[int(lo.recompute)],
        "zero": 3 if int(lo.shard) > 1 else 2 if lo.zero2 else int(bool(lo.zero1)),
        "offload": bool(lo.offload),
        "expert_overlap": bool(lo.expert_overlap),
        "graphs": GRAPHS[int(lo.graphed)],
        "adapters": bool(lo.adapters),
        "schedule": lo.schedule,
    }


def _memory_table(used: Memory, limit: float) -> dict[str, float]:
    parts = {f.name.removesuffix("_bytes"): float(getattr(used, f.name)) for f in fields(used)}
    return {**parts, "total": float(used.total_bytes), "limit": limit}


def _binds(parts: dict[str, float], used: Memory, fits: bool) -> str:
    if fits:
        name, value = max(parts.items(), key=lambda item: item[1])
        return f"{name.removesuffix('_s')} ({value / sum(parts.values()):.0%} of the step)"
    sizes = {f.name.removesuffix("_bytes"): float(getattr(used, f.name)) for f in fields(used)}
    name, size = max(sizes.items(), key=lambda item: item[1])
    return f"memory: {float(used.total_bytes) / 2**30:.1f} GiB, most of it {name} ({size / 2**30:.1f} GiB)"


def _book_price(hw: Hardware, cluster: Cluster) -> GpuHour:
    prices = load_prices()
    if hw.kind in prices.rented:
        return gpu_hour(prices, hw.kind)
    return GpuHour(0.0, {}, [f"{cluster.gpu.kind} is not in the price book: counted as free"])


CHECKPOINT_BYTES = 14.0  # per parameter: bf16 weight, float32 master copy and moments
TOKEN_BYTES = 4.0
DEFAULT_INTERVAL_S = 600.0


def _stalls(
    shape: Shape, layout: Layout, hw: Hardware, cluster: Cluster, step_s: float, every: int | None
) -> dict[str, float]:
    """A checkpoint is copied to host memory and written from there; the job waits for the copy, and for a write that is
    slower than the interval. Data are read ahead: only a storage that cannot keep up stops a step."""
    steps = every or max(round(DEFAULT_INTERVAL_S / step_s), 1)
    size = 0.0 if layout.adapters else float(shape.parameters) * CHECKPOINT_BYTES  # adapters are small
    copy_s = size / float(layout.gpus) / float(hw.host_Bps)
    late_s = read_s = 0.0
    if cluster.storage_write_GBps:
        late_s = max(size / (cluster.storage_write_GBps * 1e9) - steps * step_s, 0.0)
    if cluster.storage_read_GBps:
        read_s = float(layout.batch * layout.sequence) * TOKEN_BYTES / (cluster.storage_read_GBps * 1e9)
    return {"checkpoint_s": (copy_s + late_s) / steps, "data_s": max(read_s - step_s, 0.0)}


def _cost(
    step_s: float, stall_s: float, step_tokens: float, gpus: float, tokens: float | None, price: GpuHour
) -> dict[str, float]:
    step_s = step_s + stall_s
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


def error_bar(step_s: float, known: Calibrated, basis: str) -> dict[str, Any]:
    """The band that held 80 % of the held-out rows of this GPU type, every source counting the same."""
    error = known.error
    low, high = error.get("low", 0.7), error.get("high", 1.5)
    bar = {"low_s": step_s * low, "high_s": step_s * high, "covers": 0.8, "basis": basis}
    if error:
        bar |= {"heldout_n": int(error["n"]), "heldout_mape": error["mape"], "heldout_median_ape": error["median_ape"]}
    return bar
