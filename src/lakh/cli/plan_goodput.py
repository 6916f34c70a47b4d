"""lakh plan goodput: goodput under failures, and the best checkpoint interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lakh.cli.output import CommandResult, print_result, table

__all__ = ["goodput"]


@click.command()
@click.option("--gpus", type=click.IntRange(min=1), default=16384, show_default=True)
@click.option("--days", type=click.FloatRange(min=0, min_open=True), default=54.0, show_default=True)
@click.option(
    "--failures",
    default="llama3",
    show_default=True,
    help="Failure rates: a preset, or a .toml file with the same keys.",
)
@click.option("--interval", "interval_s", type=float, help="Seconds of work between checkpoints  [default: the best]")
@click.option(
    "--stall", "stall_s", type=float, default=5.0, show_default=True, help="Seconds a checkpoint stops the job."
)
@click.option(
    "--detect", "detect_s", type=float, default=60.0, show_default=True, help="Seconds until a failure is detected."
)
@click.option(
    "--restart",
    "restart_s",
    type=float,
    default=360.0,
    show_default=True,
    help="Seconds from detection to the first new step.",
)
@click.option(
    "--near-interval",
    "near_interval_s",
    type=float,
    default=0.0,
    help="Seconds of work between in-memory checkpoints; 0 is none.",
)
@click.option("--near-stall", "near_stall_s", type=float, default=0.0)
@click.option(
    "--near-share", type=float, default=0.9, show_default=True, help="Failures that an in-memory checkpoint survives."
)
@click.option("--partial-share", type=float, default=0.0, help="Failures after which only one replica restarts.")
@click.option("--spares", type=click.IntRange(min=0), default=4096, help="Spare nodes  [default: always one]")
@click.option("--repair-hours", type=float, default=24.0, show_default=True)
@click.option("--lemon-nodes", type=click.IntRange(min=0), default=0, help="Nodes that fail 30 times as often.")
@click.option("--runs", type=click.IntRange(1, 1_000_000), default=10_000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False), help="Plot goodput over the interval to this .png or .svg.")
@print_result
def goodput(
    gpus: int,
    days: float,
    failures: str,
    interval_s: float | None,
    runs: int,
    seed: int,
    lemon_nodes: int,
    plot: str | None,
    **policy: Any,
) -> CommandResult:
    """Goodput under failures, and the best checkpoint interval."""
    import time

    from lakh.planner.reliability.failures import load_failures
    from lakh.planner.reliability.goodput import FailureScenario, RecoveryPolicy, best_interval_s, goodput_report

    known = load_failures(failures)
    scenario = FailureScenario(
        gpus=gpus, days=days, mtbf_s=known.mtbf_s(gpus), replacing_share=known.replacing_share, lemon_nodes=lemon_nodes
    )
    if interval_s is None:
        interval_s = best_interval_s(scenario.mtbf_s, policy["stall_s"], policy["detect_s"] + policy["restart_s"])
    chosen = RecoveryPolicy(interval_s=interval_s, **policy)
    began = time.perf_counter()
    data = goodput_report(scenario, chosen, runs=runs, seed=seed)
    data |= {"seconds": time.perf_counter() - began, "source": known.source}
    if plot:
        from lakh.planner.plots import goodput_curve

        goodput_curve(scenario, chosen, Path(plot))
        data["plot"] = plot
    return CommandResult(data, _page(data))


def _page(data: dict[str, Any]) -> Any:
    rows = [
        ("goodput (simulated)", f"{data['goodput']:.1%}  (90 % of runs: {data['low']:.1%} to {data['high']:.1%})"),
        *((f"lost: {name.replace('_', ' ')}", f"{share:.2%}") for name, share in data["badput"].items() if share),
        (
            "checkpoint interval",
            f"{data['interval_s']:.0f} s; the best without in-memory checkpoints is {data['best_interval_s']:.0f} s",
        ),
        ("interruptions per day", f"{data['failures_per_day']:.2f}: one per {data['mtbf_s'] / 60:.1f} min"),
        (
            "closed form (Daly)",
            f"{data['closed_forms']['daly']:.1%}: without lemon nodes, spares and in-memory checkpoints",
        ),
        ("first order (Young)", f"{data['closed_forms']['young_first_order']:.1%}: for comparison only"),
        ("of a restart, joining", f"{data['joining_s']:.2g} s over c3, from measured startup of up to 512 ranks"),
        ("rates from", data["source"]),
    ]
    return table(["simulated", "value"], rows)
