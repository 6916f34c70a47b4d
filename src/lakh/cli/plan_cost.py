"""lakh plan cost: GPUs for a deadline or days on a number of GPUs, with reserves and cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lakh.cli.output import CommandResult, print_result, table
from lakh.cli.plan import MODEL_HELP, NUMBER, failures_option, owned_option, plot_option, prices_option

__all__ = ["cost"]


@click.command()
@click.option("--model", required=True, help=MODEL_HELP)
@click.option("--cluster", default="h100-pod", show_default=True, help="Cluster file, or a name that ships with lakh.")
@click.option("--tokens", type=float, required=True, help="Tokens of the run, e.g. 1.4e12.")
@click.option("--sequence", type=NUMBER, default=4096, show_default=True, help="Tokens per sequence.")
@click.option("--batch", type=NUMBER, help="Sequences per step  [default: 4M tokens]")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="Deadline: how many GPUs does it take?")
@click.option("--gpus", type=NUMBER, help="Number of GPUs: how many days does it take?")
@click.option("--tflops", type=float, help="TFLOP/s of a GPU in a step  [default: of the best layout]")
@click.option("--goodput", type=float, help="Share of useful time  [default: from the failure rates]")
@click.option("--overhead", type=float, default=0.0, show_default=True, help="Share for evaluation and checkpoints.")
@failures_option
@click.option("--repair-hours", default=24.0, show_default=True, help="Hours until a node is repaired.")
@click.option("--confidence", default=0.99, show_default=True, help="Probability of enough spares.")
@owned_option
@prices_option
@plot_option("the sensitivity")
@print_result
def cost(
    model: str, cluster: str, failures: str, owned: bool, prices: str | None, plot: str | None, **options: Any
) -> CommandResult:
    """Compute GPUs for a deadline, or days on a number of GPUs, and the cost."""
    from lakh.cli.plan_model import planned_model
    from lakh.planner.cost.prices import cluster_price
    from lakh.planner.cost.training_cost import plan_cost
    from lakh.planner.reliability.failures import load_failures
    from lakh.spec.cluster import load_cluster

    place = load_cluster(cluster)
    price = cluster_price(place, prices, owned=owned)
    data = plan_cost(planned_model(model), place, price, load_failures(failures), **options)
    if plot:
        from lakh.planner.plots import tornado

        tornado(data["sensitivity"], Path(plot))
        data["plot"] = plot
    return CommandResult(data, _page(data))


def _page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    rows = [
        ("work", f"{data['flops']:.3g} FLOP, causal attention and logits included"),
        ("GPUs", f"{data['gpus_net']:,} working + {data['gpus_spare']:,} spare = {data['gpus_total']:,}"),
        ("days", f"{data['days']:.1f}"),
        ("GPU-hours", f"{data['gpu_hours']:,.0f}"),
        ("cost", f"{data['usd']:,.0f} USD; {data['usd_per_million_tokens']:.3g} USD per million tokens"),
        *((f"  for {name.replace('_', ' ')}", f"{usd:,.0f} USD") for name, usd in data["usd_parts"].items() if usd),
        ("one failure (15 min of all)", f"{data['usd_per_failure']:,.0f} USD"),
        ("MFU in a step", f"{data['mfu_step']:.1%}"),
        ("MFU of the whole run", f"{data['mfu_run']:.1%}"),
        *(("assumes", text) for text in data["assumptions"]),
    ]
    names = ["lever", "usd_less", "usd_more", "days_less", "days_more"]
    lines = [[row["lever"], *(f"{row[n]:+,.4g}" for n in names[1:])] for row in data["sensitivity"]]
    head = ["20 % less or more of", "USD, less", "USD, more", "days, less", "days, more"]
    return Group(table(["simulated", "value"], rows), table(head, lines))
