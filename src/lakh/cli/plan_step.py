"""lakh plan step: one step through the simulated network and pipeline schedule."""

from __future__ import annotations

from typing import Any

import click

from lakh.cli.output import CommandResult, console, print_result, table
from lakh.cli.plan import add_options
from lakh.cli.plan_fabric import ROUTINGS
from lakh.cli.plan_layout import PLAN_OPTIONS, REQUEST_OPTIONS

__all__ = ["step"]


@click.command()
@add_options(REQUEST_OPTIONS)
@add_options([click.option(name, type=kind, help=text) for name, (kind, text) in PLAN_OPTIONS.items()])
@click.option(
    "--stages-inside",
    is_flag=True,
    default=None,
    help="Number ranks so that pipeline stages are nearer than data ranks.",
)
@click.option("--program", default="lakh", show_default=True, help="Program that trains, as in lakh plan estimate.")
@click.option("--routing", type=click.Choice(ROUTINGS), default="e-ecmp", show_default=True)
@click.option("--qps", type=click.IntRange(1, 64), default=16, show_default=True, help="Queue pairs per connection.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of the hashes of routing.")
@click.option("--published", is_flag=True, help="Only: published steps of Llama 3 405B beside the simulated ones.")
@print_result
def step(program: str, routing: str, qps: int, seed: int, published: bool, **options: Any) -> CommandResult:
    """Simulate one step: its flows on the network, its pipeline as a timeline."""
    from lakh.cli.plan_model import planned_model
    from lakh.planner.estimate import check_plan
    from lakh.planner.request import PlanRequest
    from lakh.planner.step_simulation import simulate_step

    if published:
        return _published(options["chunks"])
    request = PlanRequest.of(options, planned_model)
    plan = request.execution_plan(program, **options)
    check_plan(request.model, plan, request.cluster)
    with console().status("flows and timeline"):
        found = simulate_step(
            request.model, plan, request.cluster, program=program, routing=routing, qps=qps, seed=seed
        )
    tokens = float(plan.batch * plan.sequence)
    peak = request.cluster.gpu.peak_FLOPs * float(plan.gpus)

    def mfu(seconds: float, causal: bool) -> float:
        return float(request.model.flops_per_token(plan.sequence, causal=causal)) * tokens / seconds / peak

    data: dict[str, Any] = {"layout": plan.summary(), "nic_shares": vars(found.shares), "simulated": True}
    for name, one in (("closed_form", found.closed), ("through_network_and_schedule", found.simulated)):
        seconds = float(one.total_s)
        parts = {part: float(value) for part, value in vars(one).items()}
        data[name] = {"step_s": seconds, "mfu": mfu(seconds, True), "mfu_palm": mfu(seconds, False), "parts_s": parts}
    return CommandResult(data, lambda: _page(data))


def _page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    closed, simulated = data["closed_form"], data["through_network_and_schedule"]
    rows: list[tuple[str, ...]] = [("step s", *(f"{one['step_s']:.4g}" for one in (closed, simulated)))]
    rows += [
        (label, *(f"{one[name]:.1%}" for one in (closed, simulated)))
        for label, name in (("MFU, causal", "mfu"), ("MFU, PaLM-style", "mfu_palm"))
    ]
    rows += [
        (part.removesuffix("_s"), f"{value:.4g}", f"{simulated['parts_s'][part]:.4g}")
        for part, value in closed["parts_s"].items()
        if max(value, simulated["parts_s"][part]) > 0
    ]
    shares = data["nic_shares"]
    text = f"slowest pair, of a NIC with even spreading: rings {shares['ring']:.1%}, pipeline {shares['send']:.1%}"
    return Group(table(["simulated", "closed forms", "network and schedule"], rows), text)


def _published(chunks: int | None) -> CommandResult:
    from lakh.planner.validation.published_steps import compare_published, load_published_steps

    steps = load_published_steps()
    with console().status("published steps"):
        rows = compare_published(steps, chunks)
    data = {"source": steps.source, "model": steps.model, "cluster": steps.cluster, "rows": rows, "simulated": True}
    return CommandResult(data, lambda: _published_page(data))


def _published_page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    head = ["GPUs", "sequence", "cp", "chunks", "published MFU", "simulated", "difference", "closed forms"]
    rows = [
        (f"{row['gpus']:,}", f"{row['sequence']:,}", row["cp"], row["chunks"], f"{row['published_mfu']:.0%}",
         f"{row['simulated_mfu']:.1%}", f"{row['points']:+.1f} points", f"{row['closed_form_mfu']:.1%}")
        for row in data["rows"]
    ]  # fmt: skip
    return Group(
        table(head, rows, f"{data['model']} on {data['cluster']}"),
        f"published: {data['source']}",
        "chunks per stage and kernels are not published: --chunks N shows another number",
    )
