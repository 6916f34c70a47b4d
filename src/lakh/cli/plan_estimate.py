"""lakh plan estimate: memory, step time and cost of one layout, with an error bar."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lakh.cli.output import CommandResult, print_result, table
from lakh.cli.plan_options import plan_options, request_options
from lakh.planner.request import plan_request

__all__ = ["estimate"]

COSTS = {
    "usd_per_gpu_hour": "USD per GPU-hour",
    "usd_per_step": "USD per step",
    "usd_per_million_tokens": "USD per million tokens",
    "run_days": "days for the run",
    "run_gpu_hours": "GPU-hours",
    "run_usd": "USD for the run",
}


@click.command()
@request_options
@plan_options
@click.option("--owned", is_flag=True, help="Price owned GPUs instead of rented ones.")
@click.option("--prices", type=click.Path(dir_okay=False), help="Your own price book (TOML).")
@click.option("--plot", type=click.Path(dir_okay=False), help="Plot the roofline to this .png or .svg.")
@print_result
def estimate(
    run: str | None,
    model: str | None,
    cluster: str | None,
    gpus: int | None,
    batch: int | None,
    sequence: int | None,
    tokens: float | None,
    owned: bool,
    prices: str | None,
    plot: str | None,
    **options: Any,
) -> CommandResult:
    """Memory, step time and cost of one layout, with an error bar."""
    from lakh.planner.estimate import estimate_plan

    request = plan_request(run, model, cluster, gpus, batch, sequence, tokens)
    plan = request.execution_plan(**options)
    price = request.price(prices, owned=owned) if owned or prices else None
    found = estimate_plan(request.model, plan, request.cluster, tokens=request.tokens, price=price)
    if plot:
        from lakh.planner.plots import roofline

        roofline(request.model, plan, request.cluster, Path(plot))
    data = asdict(found) | ({"plot": plot} if plot else {})
    return CommandResult(data, _page(data), exit_code=0 if found.fits else 2)


def _page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    bar, cost, layout = data["error_bar"], data["cost"], data["layout"]
    rows: list[tuple[str, Any]] = [
        ("fits", data["fits"]),
        ("binds", data["binds"]),
        ("GPUs", layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"]),
        ("layout", _layout(layout)),
        (
            "step",
            f"{data['step_s']:.4g} s  (80 % of held-out rows were within {bar['low_s']:.4g} to {bar['high_s']:.4g})",
        ),
        ("model FLOP/s per GPU", f"{data['tflops_per_gpu']:.0f} TFLOP/s"),
        ("MFU, causal (PaLM-style)", f"{data['mfu']:.1%}  ({data['mfu_palm']:.1%})"),
        ("tokens per second", f"{data['tok_per_s']:,.0f}"),
        ("stalls per step", ", ".join(f"{name.removesuffix('_s')} {s:.3g} s" for name, s in data["stalls"].items())),
        ("cost", ", ".join(f"{value:,.4g} {COSTS[name]}" for name, value in cost.items())),
    ]
    if data["nearest"]:
        change = ", ".join(f"{name} {value}" for name, value in data["nearest"]["change"].items())
        rows.append(("nearest that fits", f"{change} ({data['nearest']['memory_bytes'] / 2**30:.1f} GiB)"))
    elif not data["fits"]:
        rows.append(("nearest that fits", "nothing with this number of GPUs: use more"))
    memory = [(name, f"{size / 2**30:.2f}") for name, size in data["memory_bytes"].items()]
    total = sum(data["step_parts_s"].values())
    parts = [
        (name.removesuffix("_s"), f"{s:.4g}", f"{s / total:.1%}") for name, s in data["step_parts_s"].items() if s > 0
    ]
    notes = [("note", note) for note in data["notes"]]
    return Group(
        table(["simulated", "value"], [*rows, *notes]),
        table(["memory of the fullest GPU", "GiB"], memory),
        table(["part of the step", "seconds", "share"], parts),
    )


def _layout(layout: dict[str, Any]) -> str:
    """Degrees above 1 and settings that are not off."""
    axes = ("tp", "pp", "cp", "ep", "dp", "shard", "chunks")
    degrees = [f"{name} {layout[name]}" for name in axes if layout[name] > 1]
    others = {name: value for name, value in layout.items() if name not in axes and value not in (False, "none")}
    return ", ".join(degrees + [name if value is True else f"{name} {value}" for name, value in others.items()])
