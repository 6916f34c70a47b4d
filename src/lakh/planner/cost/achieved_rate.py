"""Model FLOP/s per GPU of the best execution plan: connects the search with the cost of a run."""

from __future__ import annotations

import math

from lakh.errors import InfeasiblePlan
from lakh.planner.search.candidates import SearchConstraints
from lakh.planner.search.layout_search import LayoutSearchResult, search
from lakh.spec.cluster import Cluster
from lakh.spec.model import Model

__all__ = ["rate_for_days", "rate_for_gpus"]


def rate_for_gpus(model: Model, cluster: Cluster, *, gpus: int, batch: int, sequence: int) -> tuple[float, str]:
    """TFLOP/s per GPU of the best plan on `gpus` GPUs, and a description of that plan.

    If no plan divides this number, the next smaller number of whole nodes or power of two is used.
    """
    node = cluster.node_size
    for count in sorted({gpus, gpus // node * node, 2 ** int(math.log2(gpus))} - {0}, reverse=True):
        found = _search(model, cluster, count, batch, sequence)
        if found.best is not None:
            return _tflops(model, found, count, batch, sequence), _description(found, count)
    raise InfeasiblePlan(f"{gpus} GPUs of {cluster.name}", found.why, "use more GPUs, or another batch")


def rate_for_days(
    model: Model, cluster: Cluster, *, flops: float, seconds: float, batch: int, sequence: int
) -> tuple[float, str]:
    """The rate on the smallest power of two of nodes that does `flops` within `seconds` of progress."""
    count, why = cluster.node_size, ""
    while count <= cluster.gpus:
        found = _search(model, cluster, count, batch, sequence)
        why = found.why
        if found.best is not None:
            rate = _tflops(model, found, count, batch, sequence)
            needed_s = flops / (rate * 1e12 * count)
            if needed_s <= seconds:
                return rate, _description(found, count)
            why = f"{count} GPUs take {needed_s / 86400:.1f} days"
        count *= 2
    found_text = f"is too small for the deadline: {why}"
    raise InfeasiblePlan(f"cluster {cluster.name}", found_text, "give more days or a larger batch")


def _search(model: Model, cluster: Cluster, gpus: int, batch: int, sequence: int) -> LayoutSearchResult:
    return search(model, cluster, SearchConstraints(batch=batch, sequence=sequence, gpus=(gpus,), offload=False))


def _tflops(model: Model, found: LayoutSearchResult, gpus: int, batch: int, sequence: int) -> float:
    assert found.best is not None
    work = batch * sequence * model.flops_per_token(sequence)
    return float(work / (found.best["step_s"] * gpus) / 1e12)


def _description(found: LayoutSearchResult, gpus: int) -> str:
    assert found.best is not None
    low, high = (found.best["error_bar"][name] / found.best["step_s"] for name in ("low_s", "high_s"))
    plan = f"best layout on {gpus:,} GPUs, simulated: {found.best_plan}"
    return f"{plan}; time and cost may differ by {low - 1:+.0%} to {high - 1:+.0%}"
