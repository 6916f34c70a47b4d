"""lakh plan tiers: which axis of parallelism belongs on which tier of the network, and clusters side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from lakh.cli.complete import complete_plan_models
from lakh.cli.output import CommandResult, print_result, table
from lakh.cli.plan import FILE, MODEL_HELP, NUMBER

__all__ = ["tiers"]

SHOWN = 8
"""Orders of a cluster; --json has all."""


@click.command()
@click.option("--model", required=True, shell_complete=complete_plan_models, help=MODEL_HELP)
@click.option(
    "--cluster",
    "clusters",
    multiple=True,
    required=True,
    metavar="NAME[,KEY=VALUE...]",
    help="A cluster; several are compared. Keys: build_days, network_usd_per_gpu, oversubscription (outermost tier).",
)
@click.option("--gpus", type=NUMBER, required=True, help="Number of GPUs of the job.")
@click.option("--batch", type=NUMBER, help="Sequences per step  [default: 4M tokens]")
@click.option("--sequence", type=NUMBER, default=8192, show_default=True, help="Tokens per sequence.")
@click.option("--tokens", type=float, help="Tokens of the whole run: for its days and cost.")
@click.option("--tp", type=NUMBER, default=1, show_default=True, help="Tensor parallelism.")
@click.option("--cp", type=NUMBER, default=1, show_default=True, help="Context parallelism.")
@click.option("--pp", type=NUMBER, default=1, show_default=True, help="Pipeline stages.")
@click.option("--ep", type=NUMBER, default=1, show_default=True, help="Expert parallelism.")
@click.option("--chunks", type=NUMBER, help="Interleaved chunks per pipeline stage.")
@click.option("--zero", type=click.IntRange(0, 2), default=1, show_default=True, help="ZeRO stage.")
@click.option("--micro-batch", type=NUMBER, default=1, show_default=True)
@click.option("--prices", type=FILE, help="Your own price book (TOML); clusters are owned.")
@print_result
def tiers(
    model: str, clusters: tuple[str, ...], gpus: int, tokens: float | None, prices: str | None, **options: Any
) -> CommandResult:
    """Time all orders of the axes of parallelism on the tiers of a network; compare clusters for one job."""
    from lakh.cli.plan_model import planned_model
    from lakh.planner.cost.prices import load_prices
    from lakh.planner.estimate import check_plan
    from lakh.planner.placement.build_choice import compare_builds, parse_build
    from lakh.planner.request import PlanRequest

    builds = [parse_build(text) for text in clusters]
    asked = {"run": None, "model": model, "cluster": builds[0].name, "gpus": gpus, "tokens": tokens}
    request = PlanRequest.of(asked | {name: options.pop(name) for name in ("batch", "sequence")}, planned_model)
    plan = request.execution_plan(**options)
    for build in builds:
        check_plan(request.model, plan, build.cluster)
    found = compare_builds(request.model, plan, builds, tokens, load_prices(prices))
    data = {
        "clusters": [row | {"orders": [one.as_dict() for one in orders]} for row, orders in found],
        "layout": plan.summary(),
        "simulated": True,
    }
    return CommandResult(data, lambda: _page(data))


def _page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    pages: list[Any] = []
    for row in data["clusters"]:
        lines = [
            (" ".join(one["order"]), f"{one['step_s']:.4g}",
             ", ".join(f"{axis}: {tier}" for axis, tier in one["tiers"].items()), one["reason"])
            for one in row["orders"][:SHOWN]
        ]  # fmt: skip
        pages.append(table(["order, innermost first", "step s", "tier of each axis", "reason"], lines, row["cluster"]))
        if len(row["orders"]) > SHOWN:
            slowest = row["orders"][-1]
            left = len(row["orders"]) - SHOWN
            pages.append(f"{left} slower orders, up to {slowest['step_s']:.4g} s ({slowest['reason']}); all: --json")
    if len(data["clusters"]) > 1 or "run_days" in data["clusters"][0]:
        pages.append(_side_by_side(data["clusters"]))
    return Group(*pages)


def _side_by_side(rows: list[dict[str, Any]]) -> Any:
    formats: dict[str, Callable[[dict[str, Any]], str]] = {
        "step s": lambda row: f"{row['step_s']:.4g}",
        "MFU, causal": lambda row: f"{row['mfu']:.1%}",
        "bisection, TB/s each way": lambda row: f"{row['bisection_TBps']:,.1f}",
        "network, million USD": lambda row: f"{row['network_usd'] / 1e6:,.1f}",
        "USD per GPU-hour, owned": lambda row: f"{row['usd_per_gpu_hour']:.2f}",
        "days to build": lambda row: "not given" if row["build_days"] is None else f"{row['build_days']:g}",
    }
    if "run_days" in rows[0]:
        formats |= {
            "days of the run": lambda row: f"{row['run_days']:.1f}",
            "done after days": lambda row: f"{row['done_after_days']:.1f}",
            "million USD of the run": lambda row: f"{row['run_usd'] / 1e6:,.1f}",
        }
    head = ["simulated", *(row["cluster"] for row in rows)]
    return table(head, [(label, *map(text, rows)) for label, text in formats.items()], "Clusters side by side")
