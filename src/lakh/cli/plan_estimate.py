"""lakh plan estimate: memory, step time and cost of one layout, with an error bar."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lakh.cli.output import CommandResult, print_result, table
from lakh.cli.plan_question import ask, layout_options, question_options, with_options

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
@question_options
@layout_options
@click.option("--owned", is_flag=True, help="Price GPUs that are owned instead of rented.")
@click.option("--prices", type=click.Path(dir_okay=False), help="A price book of your own (TOML).")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the roofline into this .png or .svg.")
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
    **changes: Any,
) -> CommandResult:
    """Memory, step time and cost of one layout, with an error bar."""
    from lakh.planner.estimate import estimate_layout
    from lakh.planner.hardware import kind_of
    from lakh.planner.prices import gpu_hour, load_prices

    question = ask(run, model, cluster, gpus, batch, sequence, tokens)
    layout = with_options(question, changes)
    price = None
    if owned or prices:
        book = load_prices(prices)
        kind = kind_of(question.cluster.gpu.kind)
        price = gpu_hour(book, kind, owned=owned, power_W=question.cluster.gpu.power_W)
    found = estimate_layout(question.shape, layout, question.cluster, tokens=question.tokens, price=price)
    if plot:
        from lakh.planner.plots import roofline

        roofline(question.shape, layout, question.cluster, Path(plot))
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
            f"{data['step_s']:.4g} s  (8 of 10 held-out rows lay within {bar['low_s']:.4g} to {bar['high_s']:.4g})",
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
        rows.append(("nearest that fits", "none with this number of GPUs: use more"))
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
    """What is cut up, repeated or switched on; the rest is as it always is."""
    degrees = [
        f"{name} {layout[name]}" for name in ("tp", "pp", "cp", "ep", "dp", "shard", "chunks") if layout[name] > 1
    ]
    others = {name: layout[name] for name in layout if name not in ("tp", "pp", "cp", "ep", "dp", "shard", "chunks")}
    words = [
        name if value is True else f"{name} {value}" for name, value in others.items() if value not in (False, "none")
    ]
    return ", ".join(degrees + words)
