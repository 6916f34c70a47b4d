"""GPUs, days and dollars of a run, with reserves, failures and sensitivity.

    net GPUs      = FLOPs / (rate x seconds of progress)
    progress      = days x goodput x (1 - share of evaluation and checkpoints)
    spare nodes   by the binomial: enough working nodes at a stated confidence
    total         in whole nodes

`plan_cost` answers the whole question from a model and a cluster; every answer lists its assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lakh import config
from lakh.errors import InfeasiblePlan, UserError
from lakh.planner.cost.prices import GpuHour
from lakh.planner.reliability.failures import FailureStatistics
from lakh.planner.reliability.goodput import best_goodput
from lakh.planner.search.candidates import SearchConstraints
from lakh.planner.search.layout_search import search
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model

__all__ = ["CostBreakdown", "Reserves", "TrainingWork", "cost_breakdown", "plan_cost", "sensitivity", "spare_nodes"]

# Assumed where goodput is not given: stall of a checkpoint, and time from a failure to the first new step.
STALL_S, RESTART_S = 5.0, 420.0
ASSUMED_MFU = 0.4  # for a first estimate of the number of GPUs, which sets the failure rate


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """FLOPs of a run, and how fast one GPU does them."""

    flops: float
    tokens: float
    tflops_per_gpu: float
    peak_tflops: float
    usd_per_gpu_hour: float
    goodput: float = 0.93
    overhead_share: float = 0.0
    """Share of the GPUs' time for evaluation and checkpoints."""
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        amounts = ("flops", "tokens", "tflops_per_gpu", "peak_tflops")
        config.require(self, amounts, lambda value: value > 0, "is not positive", "give a positive number")
        config.require(self, "goodput", lambda share: 0 < share <= 1, "is not a share", "choose above 0, up to 1")
        config.require(self, "overhead_share", lambda share: 0 <= share < 1, "is not a share", "choose 0 up to 1")
        config.require_not_negative(self, "usd_per_gpu_hour")

    @property
    def mfu(self) -> float:
        return self.tflops_per_gpu / self.peak_tflops


@dataclass(frozen=True, kw_only=True)
class Reserves:
    """Parameters that size the pool of spare nodes."""

    failures_per_gpu_hour: float
    repair_hours: float = 24.0
    confidence: float = 0.99

    def __post_init__(self) -> None:
        config.require(self, "confidence", lambda share: 0 < share < 1, "is not a confidence", "choose e.g. 0.99")
        config.require_not_negative(self, "failures_per_gpu_hour", "repair_hours")


@dataclass(frozen=True)
class CostBreakdown:
    """`usd` is the sum of `usd_parts`."""

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
    """FLOPs over the peak of all GPUs, including spares, for the whole time."""
    assumptions: list[str] = field(default_factory=list)


def gpus_for_days(work: TrainingWork, days: float) -> int:
    """GPUs that finish in time, in whole nodes, without spares."""
    if days <= 0:
        raise UserError("--days", f"{days:g} is not positive", "give the available days")
    seconds = days * 86400 * work.goodput * (1 - work.overhead_share)
    net = work.flops / (work.tflops_per_gpu * 1e12 * seconds)
    return math.ceil(net / work.gpus_per_node - 1e-9) * work.gpus_per_node


def days_for_gpus(work: TrainingWork, gpus: int) -> float:
    if gpus < 1:
        raise UserError("--gpus", f"{gpus} GPUs", "give 1 or more")
    return work.flops / (work.tflops_per_gpu * 1e12 * gpus * work.goodput * (1 - work.overhead_share)) / 86400


def spare_nodes(nodes: int, reserves: Reserves, gpus_per_node: int = 8) -> int:
    """Fewest spare nodes such that at least `nodes` nodes work, at the stated confidence."""
    rate = reserves.failures_per_gpu_hour * gpus_per_node
    down = rate * reserves.repair_hours / (1 + rate * reserves.repair_hours)
    if down <= 0:
        return 0
    spares = 0
    while _probability_at_least(nodes, nodes + spares, 1 - down) < reserves.confidence:
        spares += 1
    return spares


def _probability_at_least(need: int, have: int, up: float) -> float:
    """Probability that of `have` nodes, each up with probability `up`, at least `need` are up."""
    log_up, log_down = math.log(up), math.log1p(-up)
    total = 0.0
    for broken in range(have - need + 1):
        ways = math.lgamma(have + 1) - math.lgamma(broken + 1) - math.lgamma(have - broken + 1)
        total += math.exp(ways + broken * log_down + (have - broken) * log_up)
    return min(total, 1.0)


def cost_breakdown(
    work: TrainingWork, gpus: int, reserves: Reserves, *, loss_per_failure_s: float = 900.0
) -> CostBreakdown:
    """Cost of the run on `gpus` working GPUs."""
    nodes = math.ceil(gpus / work.gpus_per_node)
    spare = spare_nodes(nodes, reserves, work.gpus_per_node) * work.gpus_per_node
    total = nodes * work.gpus_per_node + spare
    days = days_for_gpus(work, gpus)
    hours = days * 24
    price = work.usd_per_gpu_hour
    useful = gpus * hours * work.goodput * (1 - work.overhead_share) * price
    parts = {
        "progress": useful,
        "failures": gpus * hours * (1 - work.goodput) * price,
        "evaluation_and_checkpoints": gpus * hours * work.goodput * work.overhead_share * price,
        "spares": spare * hours * price,
        "rounding_to_nodes": (total - spare - gpus) * hours * price,
    }
    usd = math.fsum(parts.values())
    return CostBreakdown(
        gpus_net=gpus,
        gpus_spare=spare,
        gpus_total=total,
        days=days,
        gpu_hours=total * hours,
        usd=usd,
        usd_parts=parts,
        usd_per_million_tokens=usd / work.tokens * 1e6,
        usd_per_failure=loss_per_failure_s / 3600 * gpus * price,
        mfu_step=work.mfu,
        mfu_run=work.flops / (total * hours * 3600 * work.peak_tflops * 1e12),
        assumptions=[
            f"{work.tflops_per_gpu:g} TFLOP/s per GPU in a step, {work.mfu:.1%} of the peak",
            f"goodput {work.goodput:.1%}, {work.overhead_share:.0%} for evaluation and checkpoints, of net GPU time",
            f"spares by binomial at {reserves.confidence:.1%}: {reserves.failures_per_gpu_hour:.3g} failures per "
            f"GPU-hour, {reserves.repair_hours:g} h to repair",
            f"{price:g} USD per GPU-hour",
        ],
    )


def sensitivity(work: TrainingWork, gpus: int, reserves: Reserves, change: float = 0.2) -> list[dict[str, Any]]:
    """Change of days and dollars when one assumption changes by a fifth; the largest effect first."""
    base = cost_breakdown(work, gpus, reserves)
    lost = 1 - work.goodput
    levers: dict[str, Callable[[float], dict[str, Any]]] = {
        "rate (MFU)": lambda factor: {"tflops_per_gpu": work.tflops_per_gpu * factor},
        "tokens": lambda factor: {"tokens": work.tokens * factor, "flops": work.flops * factor},
        "price per GPU-hour": lambda factor: {"usd_per_gpu_hour": work.usd_per_gpu_hour * factor},
        "time lost to failures": lambda factor: {"goodput": min(max(1 - lost * factor, 0.01), 1.0)},
    }
    rows: list[dict[str, Any]] = []
    for name, changed in levers.items():
        row: dict[str, Any] = {"lever": name, "change": change}
        for side, factor in (("less", 1 - change), ("more", 1 + change)):
            other = cost_breakdown(replace(work, **changed(factor)), gpus, reserves)
            row |= {f"usd_{side}": other.usd - base.usd, f"days_{side}": other.days - base.days}
        rows.append(row)
    return sorted(rows, key=lambda row: -abs(row["usd_more"] - row["usd_less"]))


def plan_cost(
    model: Model,
    cluster: Cluster,
    price: GpuHour,
    failures: FailureStatistics,
    *,
    tokens: float,
    sequence: int,
    batch: int | None = None,
    days: float | None = None,
    gpus: int | None = None,
    tflops: float | None = None,
    goodput: float | None = None,
    overhead: float = 0.0,
    repair_hours: float = 24.0,
    confidence: float = 0.99,
) -> dict[str, Any]:
    """GPUs for a deadline (`days`) or days on a number of GPUs (`gpus`), with cost, reserves and sensitivity.

    `tflops` is the rate of a GPU in a step (default: of the best plan); `goodput` defaults to the best that the failure
    statistics allow; `batch` defaults to 4M tokens.
    """
    if (days is None) == (gpus is None):
        raise UserError("lakh plan cost", "needs one of --days and --gpus", "give exactly one of them")
    if tokens <= 0:
        raise UserError("--tokens", f"{tokens:g} is not positive", "give e.g. 1.4e12")
    batch = batch or max(2**22 // sequence, 1)
    flops, peak = model.flops_per_token(sequence) * tokens, cluster.gpu.dense_bf16_TFLOPs
    if goodput is None:
        size = gpus or max(int(flops / (ASSUMED_MFU * peak * 1e12 * (days or 1) * 86400)), 1)
        goodput = best_goodput(failures.mtbf_s(size), STALL_S, RESTART_S)
    if tflops is not None:
        if not 0 < tflops <= peak:
            stated = (
                f"{tflops:g} is {tflops / peak:.0%} of the dense bf16 peak of a {cluster.gpu.kind}, {peak:g} TFLOP/s"
            )
            raise UserError("--tflops", stated, "give what a GPU reaches in a step; good runs have 40 to 50 %")
        rate, basis = tflops, "as given"
    elif gpus:
        rate, basis = _rate_for_gpus(model, cluster, gpus=gpus, batch=batch, sequence=sequence)
    else:
        progress_s = (days or 0) * 86400 * goodput * (1 - overhead)
        rate, basis = _rate_for_days(model, cluster, flops=flops, seconds=progress_s, batch=batch, sequence=sequence)
    work = TrainingWork(
        flops=flops, tokens=tokens, tflops_per_gpu=rate, peak_tflops=peak, usd_per_gpu_hour=price.usd, goodput=goodput,
        overhead_share=overhead, gpus_per_node=cluster.node_size,
    )  # fmt: skip
    reserves = Reserves(failures_per_gpu_hour=failures.per_gpu_hour, repair_hours=repair_hours, confidence=confidence)
    net = gpus or gpus_for_days(work, days or 0)
    found = cost_breakdown(work, net, reserves)
    return asdict(found) | {
        "simulated": True, "flops": flops, "rate": basis, "usd_per_gpu_hour_parts": price.parts,
        "assumptions": [*found.assumptions, f"rate: {basis}", *price.assumptions],
        "sensitivity": sensitivity(work, net, reserves),
    }  # fmt: skip


# --- achieved rate: model FLOP/s per GPU of the best execution plan ---


def _rate_for_gpus(model: Model, cluster: Cluster, *, gpus: int, batch: int, sequence: int) -> tuple[float, str]:
    """TFLOP/s per GPU of the best plan on `gpus` GPUs, and a description of that plan.

    If no plan divides this number, the next smaller number of whole nodes or power of two is used.
    """
    node = cluster.node_size
    for count in sorted({gpus, gpus // node * node, 2 ** int(math.log2(gpus))} - {0}, reverse=True):
        rate, why = _best_rate(model, cluster, count, batch, sequence)
        if rate:
            return rate, why
    raise InfeasiblePlan(f"{gpus} GPUs of {cluster.name}", why, "use more GPUs, or another batch")


def _rate_for_days(
    model: Model, cluster: Cluster, *, flops: float, seconds: float, batch: int, sequence: int
) -> tuple[float, str]:
    """The rate on the smallest power of two of nodes that does `flops` within `seconds` of progress."""
    count, why = cluster.node_size, ""
    while count <= cluster.gpus:
        rate, why = _best_rate(model, cluster, count, batch, sequence)
        if rate:
            needed_s = flops / (rate * 1e12 * count)
            if needed_s <= seconds:
                return rate, why
            why = f"{count} GPUs take {needed_s / 86400:.1f} days"
        count *= 2
    found = f"is too small for the deadline: {why}"
    raise InfeasiblePlan(f"cluster {cluster.name}", found, "give more days or a larger batch")


def _best_rate(model: Model, cluster: Cluster, gpus: int, batch: int, sequence: int) -> tuple[float, str]:
    """The rate and description of the best plan; 0 and the reason if there is none."""
    limits = SearchConstraints(batch=batch, sequence=sequence, gpus=(gpus,), offload=False)
    found = search(model, cluster, limits)
    if found.best is None:
        return 0.0, found.why
    step_s, bar = found.best["step_s"], found.best["error_bar"]
    low, high = bar["low_s"] / step_s - 1, bar["high_s"] / step_s - 1
    plan = f"best layout on {gpus:,} GPUs, simulated: {found.best_plan}"
    work = batch * sequence * model.flops_per_token(sequence)
    return float(work / (step_s * gpus) / 1e12), f"{plan}; time and cost may differ by {low:+.0%} to {high:+.0%}"
