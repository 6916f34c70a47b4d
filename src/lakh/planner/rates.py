"""How fast one GPU works in the best layout: the bridge from `search` to `economics`."""

from __future__ import annotations

import math

from lakh.errors import InfeasiblePlan
from lakh.planner.candidates import Limits
from lakh.planner.search import Found, search
from lakh.planner.shape import Shape
from lakh.spec.cluster import Cluster

__all__ = ["rate_for_days", "rate_of"]


def rate_of(shape: Shape, cluster: Cluster, *, gpus: int, batch: int, sequence: int) -> tuple[float, str]:
    """TFLOP/s per GPU of the best layout on so many GPUs, and which layout that is.

    Where the number divides badly, the best layout on the next smaller number of whole node groups stands for it.
    """
    node = cluster.node_size
    ladder = sorted({gpus, gpus // node * node, 2 ** int(math.log2(gpus))} - {0}, reverse=True)
    for count in ladder:
        found = search(shape, cluster, Limits(batch=batch, sequence=sequence, gpus=(count,), offload=False))
        if found.best is not None:
            return _rate(shape, found, count, batch, sequence), _words(found, count)
    raise InfeasiblePlan(f"{gpus} GPUs of {cluster.name}", found.why, "use more GPUs, or another batch")


def rate_for_days(
    shape: Shape, cluster: Cluster, *, flops: float, seconds: float, batch: int, sequence: int
) -> tuple[float, str]:
    """The rate at the smallest power of two of GPUs that is done within so many seconds of progress."""
    count = cluster.node_size
    why = ""
    while count <= cluster.gpus:
        found = search(shape, cluster, Limits(batch=batch, sequence=sequence, gpus=(count,), offload=False))
        if found.best is not None:
            rate = _rate(shape, found, count, batch, sequence)
            if flops / (rate * 1e12 * count) <= seconds:
                return rate, _words(found, count)
            why = f"{count} GPUs take {flops / (rate * 1e12 * count) / 86400:.1f} days"
        else:
            why = found.why
        count *= 2
    raise InfeasiblePlan(
        f"cluster {cluster.name}", f"is too small for the deadline: {why}", "give more days or a larger batch"
    )


def _rate(shape: Shape, found: Found, gpus: int, batch: int, sequence: int) -> float:
    assert found.best is not None
    work = batch * sequence * float(shape.flops_per_token(sequence))
    return float(work / (found.best["step_s"] * gpus) / 1e12)


def _words(found: Found, gpus: int) -> str:
    assert found.best is not None
    low, high = (found.best["error_bar"][name] / found.best["step_s"] for name in ("low_s", "high_s"))
    layout = found.why.partition(" takes ")[0]
    return f"best layout on {gpus:,} GPUs, simulated: {layout}; time and cost may lie {low - 1:+.0%} to {high - 1:+.0%}"
