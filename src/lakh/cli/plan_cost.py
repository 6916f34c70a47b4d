"""lakh plan cost: GPUs for a deadline or days for a budget of GPUs, reserves and money."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lakh.cli.output import CommandResult, print_result, table

__all__ = ["cost"]


@click.command()
@click.option("--model", required=True, help="A model of the catalogue, or a .toml file with the same keys.")
@click.option("--cluster", default="h100-pod", show_default=True)
@click.option("--tokens", type=float, required=True, help="Tokens of the run, e.g. 1.4e12.")
@click.option("--sequence", type=click.IntRange(min=1), default=4096, show_default=True)
@click.option("--batch", type=click.IntRange(min=1), help="Sequences per step  [default: 4M tokens]")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="How many GPUs finish in so many days?")
@click.option("--gpus", type=click.IntRange(min=1), help="How many days do so many GPUs take?")
@click.option("--tflops", type=float, help="Rate of a GPU in a step  [default: of the best layout found]")
@click.option("--goodput", type=float, help="Share of the time that stays  [default: from the failure rates]")
@click.option("--overhead", type=float, default=0.0, show_default=True, help="Share for evaluation and checkpoints.")
@click.option("--failures", default="llama3", show_default=True, help="Rates that size the spares.")
@click.option("--repair-hours", type=float, default=24.0, show_default=True)
@click.option("--confidence", type=float, default=0.99, show_default=True, help="That enough spares stand ready.")
@click.option("--owned", is_flag=True, help="GPUs that are owned instead of rented.")
@click.option("--prices", type=click.Path(dir_okay=False), help="A price book of your own (TOML).")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the sensitivity into this .png or .svg.")
@print_result
def cost(
    model: str,
    cluster: str,
    tokens: float,
    sequence: int,
    batch: int | None,
    days: float | None,
    gpus: int | None,
    tflops: float | None,
    goodput: float | None,
    overhead: float,
    failures: str,
    repair_hours: float,
    confidence: float,
    owned: bool,
    prices: str | None,
    plot: str | None,
) -> CommandResult:
    """GPUs for a deadline or days for a budget of GPUs, reserves and money."""
    from lakh.errors import UserError
    from lakh.planner.catalogue import architecture
    from lakh.planner.economics import Job, Reserves, bill, gpus_for_days, sensitivity
    from lakh.planner.failures import load_failures
    from lakh.planner.goodput import best_goodput
    from lakh.planner.hardware import kind_of
    from lakh.planner.prices import gpu_hour, load_prices
    from lakh.planner.rates import rate_for_days, rate_of
    from lakh.spec.cluster import load_cluster

    if (days is None) == (gpus is None):
        raise UserError("lakh plan cost", "needs one of --days and --gpus", "say which of them is given")
    if tokens <= 0:
        raise UserError("--tokens", f"{tokens:g} is not positive", "give e.g. 1.4e12")
    shape, place = architecture(model).shape, load_cluster(cluster)
    size = batch or max(2**22 // sequence, 1)
    price = gpu_hour(load_prices(prices), kind_of(place.gpu.kind), owned=owned, power_W=place.gpu.power_W)
    flops = float(shape.flops_per_token(sequence)) * tokens
    rates = load_failures(failures)
    if goodput is None:  # at the size that the work itself asks for; 5 s stall, 7 min to run again
        guess = gpus or max(int(flops / (0.4 * place.gpu.dense_bf16_TFLOPs * 1e12 * (days or 1) * 86400)), 1)
        goodput = best_goodput(rates.mtbf_s(guess), stall_s=5.0, restart_s=420.0)
    net_share = goodput * (1 - overhead)
    if tflops:
        rate, how = tflops, "as given"
    elif gpus:
        rate, how = rate_of(shape, place, gpus=gpus, batch=size, sequence=sequence)
    else:
        assert days is not None
        rate, how = rate_for_days(
            shape, place, flops=flops, seconds=days * 86400 * net_share, batch=size, sequence=sequence
        )
    job = Job(
        flops=flops, tokens=tokens, tflops_per_gpu=rate, peak_tflops=place.gpu.dense_bf16_TFLOPs,
        usd_per_gpu_hour=price.usd, goodput=goodput, overhead_share=overhead, gpus_per_node=place.node_size,
    )  # fmt: skip
    reserves = Reserves(failures_per_gpu_hour=rates.per_gpu_hour, repair_hours=repair_hours, confidence=confidence)
    net = gpus if gpus else gpus_for_days(job, days or 0)
    found = bill(job, net, reserves)
    rows = sensitivity(job, net, reserves)
    data = asdict(found) | {
        "simulated": True, "flops": flops, "rate": how, "usd_per_gpu_hour_parts": price.parts,
        "assumptions": [*found.assumptions, f"rate: {how}", *price.assumptions], "sensitivity": rows,
    }  # fmt: skip
    if plot:
        from lakh.planner.plots import tornado

        tornado(rows, Path(plot))
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
        *((f"  of it {name.replace('_', ' ')}", f"{usd:,.0f} USD") for name, usd in data["usd_parts"].items() if usd),
        ("one failure (15 min of all)", f"{data['usd_per_failure']:,.0f} USD"),
        ("MFU in a step", f"{data['mfu_step']:.1%}"),
        ("MFU of the whole run", f"{data['mfu_run']:.1%}"),
        *(("assumes", text) for text in data["assumptions"]),
    ]
    names = ["lever", "usd_less", "usd_more", "days_less", "days_more"]
    lines = [[row["lever"], *(f"{row[n]:+,.4g}" for n in names[1:])] for row in data["sensitivity"]]
    head = ["20 % less or more of", "USD, less", "USD, more", "days, less", "days, more"]
    return Group(table(["simulated", "value"], rows), table(head, lines))
