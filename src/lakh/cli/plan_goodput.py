"""lakh plan goodput: goodput under failures, and the best checkpoint interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lakh.cli.output import CommandResult, print_result, table
from lakh.cli.plan import NUMBER, failures_option, plot_option

__all__ = ["goodput"]


@click.command()
@click.option("--gpus", type=NUMBER, default=16384, show_default=True, help="Number of GPUs.")
@click.option(
    "--days", type=click.FloatRange(min=0, min_open=True), default=54.0, show_default=True, help="Of the run."
)
@failures_option
@click.option("--interval", "interval_s", type=float, help="Seconds of work between checkpoints  [default: the best]")
@click.option("--stall", "stall_s", default=5.0, show_default=True, help="Seconds a checkpoint stops the job.")
@click.option("--detect", "detect_s", default=60.0, show_default=True, help="Seconds until a failure is detected.")
@click.option("--restart", "restart_s", default=360.0, show_default=True, help="Seconds from detection to a new step.")
@click.option("--near-interval", "near_interval_s", default=0.0, help="Seconds between in-memory checkpoints; 0: none.")
@click.option("--near-stall", "near_stall_s", default=0.0, help="Seconds an in-memory checkpoint stops the job.")
@click.option("--near-share", default=0.9, show_default=True, help="Failures that an in-memory checkpoint survives.")
@click.option("--partial-share", default=0.0, help="Failures after which only one replica restarts.")
@click.option("--spares", type=click.IntRange(min=0), default=4096, help="Spare nodes  [default: always one]")
@click.option("--repair-hours", default=24.0, show_default=True, help="Hours until a node is repaired.")
@click.option("--lemon-nodes", type=click.IntRange(min=0), default=0, help="Nodes that fail 30 times as often.")
@click.option("--runs", type=click.IntRange(1, 1_000_000), default=10_000, show_default=True, help="Simulated runs.")
@click.option("--seed", default=1, show_default=True, help="Of the random numbers.")
@plot_option("goodput over the interval")
@print_result
def goodput(
    gpus: int, days: float, failures: str, lemon_nodes: int, runs: int, seed: int, plot: str | None, **policy: Any
) -> CommandResult:
    """Simulate goodput under failures; find the best checkpoint interval."""
    import time

    from lakh.planner.reliability.failures import load_failures
    from lakh.planner.reliability.goodput import FailureScenario, RecoveryPolicy, best_interval_s, goodput_report

    known = load_failures(failures)
    scenario = FailureScenario(
        gpus=gpus, days=days, mtbf_s=known.mtbf_s(gpus), replacing_share=known.replacing_share, lemon_nodes=lemon_nodes
    )
    if policy["interval_s"] is None:
        down_s = policy["detect_s"] + policy["restart_s"]
        policy["interval_s"] = best_interval_s(scenario.mtbf_s, policy["stall_s"], down_s)
    chosen = RecoveryPolicy(**policy)
    began = time.perf_counter()
    data = goodput_report(scenario, chosen, runs=runs, seed=seed)
    data |= {"seconds": time.perf_counter() - began, "source": known.source, "days": days}
    if plot:
        from lakh.planner.plots import goodput_curve

        goodput_curve(scenario, chosen, Path(plot))
        data["plot"] = plot
    return CommandResult(data, _page(data))


def _page(data: dict[str, Any]) -> Any:
    forms, best_s = data["closed_forms"], data["best_interval_s"]
    rows = [
        ("goodput (simulated)", f"{data['goodput']:.1%}  (90 % of runs: {data['low']:.1%} to {data['high']:.1%})"),
        *((f"lost: {name.replace('_', ' ')}", f"{share:.2%}") for name, share in data["badput"].items() if share),
        ("checkpoint interval", f"{data['interval_s']:.0f} s; best without in-memory checkpoints: {best_s:.0f} s"),
        ("interruptions per day", f"{data['failures_per_day']:.2f}: one per {data['mtbf_s'] / 60:.1f} min"),
        ("closed form (Daly)", f"{forms['daly']:.1%}: without lemon nodes, spares and in-memory checkpoints"),
        ("first order (Young)", f"{forms['young_first_order']:.1%}: for comparison only"),
        ("of a restart, joining", f"{data['joining_s']:.2g} s over c3, from measured startup of up to 512 ranks"),
        *(
            [("simulated", f"{data['runs']:,} runs of {data['simulated_days']:.3g} of {data['days']:g} days each")]
            if data["simulated_days"] < data["days"]
            else []
        ),
        ("rates from", data["source"]),
    ]
    return table(["simulated", "value"], rows)
