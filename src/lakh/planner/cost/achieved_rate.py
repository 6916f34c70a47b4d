"""Model FLOP/s per GPU of the best execution plan: connects the search with the cost of a run."""

from __future__ import annotations

import math

from lakh.errors import InfeasiblePlan
from lakh.planner.search.candidates import SearchConstraints
from lakh.planner.search.layout_search import search
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model

__all__ = ["rate_for_days", "rate_for_gpus"]


def rate_for_gpus(model: Model, cluster: Cluster, *, gpus: int, batch: int, sequence: int) -> tuple[float, str]:
    """TFLOP/s per GPU of the best plan on `gpus` GPUs, and a description of that plan.

    If no plan divides this number, the next smaller number of whole nodes or power of two is used.
    """
    node = cluster.node_size
    for count in sorted({gpus, gpus // node * node, 2 ** int(math.log2(gpus))} - {0}, reverse=True):
        rate, why = _best_rate(model, cluster, count, batch, sequence)
        if rate:
            return rate, why
    raise InfeasiblePlan(f"{gpus} GPUs of {cluster.name}", why, "use more GPUs, or another batch")


def rate_for_days(
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
