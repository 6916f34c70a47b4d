"""The same job on several clusters that could be built: step, bisection bandwidth, cost, and when the run is done."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lakh.errors import UserError
from lakh.planner.cost.prices import PriceBook, gpu_hour, load_prices
from lakh.planner.execution_plan import ExecutionPlan
from lakh.planner.placement.axis_orders import AxisOrder, axis_orders
from lakh.spec.cluster import Cluster, load_cluster
from lakh.spec.model import Model

__all__ = ["ClusterBuild", "bisection_Bps", "compare_builds", "parse_build"]


@dataclass(frozen=True)
class ClusterBuild:
    """A cluster, and what building it takes. None: not given."""

    name: str
    cluster: Cluster
    build_days: float | None = None
    network_usd_per_gpu: float | None = None


def parse_build(text: str) -> ClusterBuild:
    """ "NAME,build_days=90,network_usd_per_gpu=5000,oversubscription=7": a cluster with other inputs."""
    name, *pairs = text.split(",")
    cluster = load_cluster(name)
    given: dict[str, float] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in ("build_days", "network_usd_per_gpu", "oversubscription"):
            known = "build_days, network_usd_per_gpu, oversubscription"
            raise UserError(f"--cluster {text}", f"has an unknown input {key!r}", f"choose from: {known}")
        try:
            given[key] = float(value)
        except ValueError:
            raise UserError(f"--cluster {text}", f"{key} is {value!r}", "give a number") from None
        if given[key] < (1 if key == "oversubscription" else 0):
            raise UserError(f"--cluster {text}", f"{key} is {given[key]:g}", "give a larger number")
    over = given.pop("oversubscription", None)
    if over is not None:
        *inner, outer = cluster.tiers
        cluster = replace(cluster, tiers=(*inner, replace(outer, oversubscription=over)))
    return ClusterBuild(name, cluster, **given)


def bisection_Bps(cluster: Cluster) -> float:
    """Between the two halves of the cluster, in one direction: half of the GPUs at the rate of the outermost tier."""
    return cluster.gpus / 2 * cluster.tiers[-1].bandwidth_Bps


def compare_builds(
    model: Model, plan: ExecutionPlan, builds: list[ClusterBuild], tokens: float | None = None,
    prices: PriceBook | None = None,
) -> list[tuple[dict[str, Any], list[AxisOrder]]]:  # fmt: skip
    """One row for each cluster, in the order given, and its orders of axes."""
    return [_row(model, plan, build, tokens, prices or load_prices()) for build in builds]


def _row(
    model: Model, plan: ExecutionPlan, build: ClusterBuild, tokens: float | None, prices: PriceBook
) -> tuple[dict[str, Any], list[AxisOrder]]:  # fmt: skip
    cluster, orders = build.cluster, axis_orders(model, plan, build.cluster)
    step_tokens, step_s = float(plan.batch * plan.sequence), orders[0].step_s
    flops = float(model.flops_per_token(plan.sequence)) * step_tokens
    owned = prices.owned or load_prices().owned
    assert owned is not None
    if build.network_usd_per_gpu is not None:
        owned = replace(owned, usd_network_per_gpu=build.network_usd_per_gpu)
    hour = gpu_hour(replace(prices, owned=owned), cluster.gpu.family, owned=True, power_W=cluster.gpu.power_W)
    row: dict[str, Any] = {
        "cluster": build.name,
        "order": list(orders[0].order),
        "step_s": step_s,
        "mfu": flops / step_s / (float(plan.gpus) * cluster.gpu.peak_FLOPs),
        "bisection_TBps": bisection_Bps(cluster) / 1e12,
        "network_usd": owned.usd_network_per_gpu * cluster.gpus,
        "usd_per_gpu_hour": hour.usd,
        "build_days": build.build_days,
    }
    if tokens:
        days = tokens / step_tokens * step_s / 86400
        row["run_days"] = days
        row["run_usd"] = days * 24 * float(plan.gpus) * hour.usd
        row["done_after_days"] = days + (build.build_days or 0.0)
    return row, orders
