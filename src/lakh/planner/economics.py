"""GPUs, days and dollars of a run: from FLOPs and a rate, with reserves, failures and the sensitivity of it all.

    net GPUs      = FLOPs / (rate x seconds of progress)
    progress      = days x goodput x (1 - share of evaluation and checkpoints)
    spare nodes   by the binomial: with so many nodes in repair on average, enough stand ready at a stated confidence
    total         in whole nodes

Money comes from `prices`; every answer lists its assumptions. Knows no layout: the rate is an argument, either
published or from `search`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from lakh.errors import UserError

__all__ = ["Bill", "Job", "Reserves", "bill", "days_for_gpus", "gpus_for_days", "sensitivity", "spare_nodes"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What has to be done, and how fast one GPU does it."""

    flops: float
    tokens: float
    tflops_per_gpu: float
    peak_tflops: float
    usd_per_gpu_hour: float
    goodput: float = 0.93
    overhead_share: float = 0.0
    """Of the GPUs' time, for evaluation and checkpoints beside the run."""
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name in ("flops", "tokens", "tflops_per_gpu", "peak_tflops"):
            if getattr(self, name) <= 0:
                raise UserError(name, f"{getattr(self, name)} is not positive", "give a positive number")
        if not 0 < self.goodput <= 1 or not 0 <= self.overhead_share < 1 or self.usd_per_gpu_hour < 0:
            raise UserError("goodput", "goodput lies above 0 up to 1, the overhead share from 0 up to 1", "mend them")


@dataclass(frozen=True, kw_only=True)
class Reserves:
    """How spares are sized: nodes fail, are repaired, and enough must stand ready."""

    failures_per_gpu_hour: float
    repair_hours: float = 24.0
    confidence: float = 0.99

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1 or self.failures_per_gpu_hour < 0 or self.repair_hours < 0:
            raise UserError("--confidence", f"{self.confidence} is no confidence", "choose e.g. 0.99")


@dataclass(frozen=True)
class Bill:
    """The parts of `usd` add up to it."""

    gpus_net: int
    """GPUs that make progress."""
    gpus_spare: int
    gpus_total: int
    days: float
    gpu_hours: float
    usd: float
    usd_parts: dict[str, float]
    usd_per_million_tokens: float
    usd_per_failure: float
    mfu_step: float
    mfu_run: float
    """FLOPs over what all GPUs, spares included, could have done in the whole time."""
    assumptions: list[str] = field(default_factory=list)


def gpus_for_days(job: Job, days: float) -> int:
    """GPUs that finish in time, in whole nodes, before spares."""
    if days <= 0:
        raise UserError("--days", f"{days:g} is not positive", "give the days that are left")
    seconds = days * 86400 * job.goodput * (1 - job.overhead_share)
    net = job.flops / (job.tflops_per_gpu * 1e12 * seconds)
    return math.ceil(net / job.gpus_per_node - 1e-9) * job.gpus_per_node


def days_for_gpus(job: Job, gpus: int) -> float:
    if gpus < 1:
        raise UserError("--gpus", f"{gpus} GPUs", "give 1 or more")
    return job.flops / (job.tflops_per_gpu * 1e12 * gpus * job.goodput * (1 - job.overhead_share)) / 86400


def spare_nodes(nodes: int, reserves: Reserves, gpus_per_node: int = 8) -> int:
    """Fewest spares such that at least `nodes` of all nodes work, at the stated confidence."""
    rate = reserves.failures_per_gpu_hour * gpus_per_node
    down = rate * reserves.repair_hours / (1 + rate * reserves.repair_hours)
    if down <= 0:
        return 0
    spares = 0
    while at_least(nodes, nodes + spares, 1 - down) < reserves.confidence:
        spares += 1
    return spares


def at_least(need: int, have: int, up: float) -> float:
    """Probability that of `have` nodes, each up with probability `up`, at least `need` are up."""
    log_up, log_down = math.log(up), math.log1p(-up)
    total = 0.0
    for broken in range(have - need + 1):
        ways = math.lgamma(have + 1) - math.lgamma(broken + 1) - math.lgamma(have - broken + 1)
        total += math.exp(ways + broken * log_down + (have - broken) * log_up)
    return min(total, 1.0)


def bill(job: Job, gpus: int, reserves: Reserves, *, loss_per_failure_s: float = 900.0) -> Bill:
    """What the run costs on so many working GPUs."""
    nodes = math.ceil(gpus / job.gpus_per_node)
    spare = spare_nodes(nodes, reserves, job.gpus_per_node) * job.gpus_per_node
    total = nodes * job.gpus_per_node + spare
    days = days_for_gpus(job, gpus)
    hours = days * 24
    price = job.usd_per_gpu_hour
    useful = gpus * hours * job.goodput * (1 - job.overhead_share) * price
    parts = {
        "progress": useful,
        "failures": gpus * hours * (1 - job.goodput) * price,
        "evaluation_and_checkpoints": gpus * hours * job.goodput * job.overhead_share * price,
        "spares": spare * hours * price,
        "rounding_to_nodes": (total - spare - gpus) * hours * price,
    }
    usd = math.fsum(parts.values())
    return Bill(
        gpus_net=gpus,
        gpus_spare=spare,
        gpus_total=total,
        days=days,
        gpu_hours=total * hours,
        usd=usd,
        usd_parts=parts,
        usd_per_million_tokens=usd / job.tokens * 1e6,
        usd_per_failure=loss_per_failure_s / 3600 * gpus * price,
        mfu_step=job.tflops_per_gpu / job.peak_tflops,
        mfu_run=job.flops / (total * hours * 3600 * job.peak_tflops * 1e12),
        assumptions=[
            f"{job.tflops_per_gpu:g} TFLOP/s per GPU in a step, {job.tflops_per_gpu / job.peak_tflops:.1%} of the peak",
            f"goodput {job.goodput:.1%}, {job.overhead_share:.0%} for evaluation and checkpoints, of net GPU time",
            f"spares by binomial at {reserves.confidence:.1%}: {reserves.failures_per_gpu_hour:.3g} failures per "
            f"GPU-hour, {reserves.repair_hours:g} h to repair",
            f"{price:g} USD per GPU-hour",
        ],
    )


def sensitivity(job: Job, gpus: int, reserves: Reserves, change: float = 0.2) -> list[dict[str, Any]]:
    """Days and dollars when one assumption moves by a fifth either way; the largest lever first."""
    base = bill(job, gpus, reserves)
    levers: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "rate (MFU)": (
            {"tflops_per_gpu": job.tflops_per_gpu * (1 - change)},
            {"tflops_per_gpu": job.tflops_per_gpu * (1 + change)},
        ),
        "tokens": (
            {"tokens": job.tokens * (1 - change), "flops": job.flops * (1 - change)},
            {"tokens": job.tokens * (1 + change), "flops": job.flops * (1 + change)},
        ),
        "price per GPU-hour": (
            {"usd_per_gpu_hour": job.usd_per_gpu_hour * (1 - change)},
            {"usd_per_gpu_hour": job.usd_per_gpu_hour * (1 + change)},
        ),
        "time lost to failures": (
            {"goodput": min(1 - (1 - job.goodput) * (1 - change), 1.0)},
            {"goodput": max(1 - (1 - job.goodput) * (1 + change), 0.01)},
        ),
    }
    rows = []
    for name, (less, more) in levers.items():
        low, high = (bill(replace(job, **values), gpus, reserves) for values in (less, more))
        rows.append(
            {
                "lever": name,
                "change": change,
                "usd_less": low.usd - base.usd,
                "usd_more": high.usd - base.usd,
                "days_less": low.days - base.days,
                "days_more": high.days - base.days,
            }
        )
    return sorted(rows, key=lambda row: -abs(row["usd_more"] - row["usd_less"]))
