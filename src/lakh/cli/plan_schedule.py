"""lakh plan schedule: pipeline schedules side by side, with delays between stages."""

from __future__ import annotations

from typing import Any

import click

from lakh.cli.output import CommandResult, print_result, table
from lakh.cli.plan import NUMBER
from lakh.errors import UserError

__all__ = ["schedule"]

SECONDS = click.FloatRange(min=0)


@click.command()
@click.option("--stages", type=NUMBER, required=True, help="Ranks of the pipeline.")
@click.option("--micro-batches", type=NUMBER, required=True, help="Of one step.")
@click.option("--kind", help="Only this schedule, e.g. 1f1b or zb-h1  [default: all]")
@click.option("--chunks", type=NUMBER, help="Stages per rank of interleaved, lean and breadth-first  [default: 2]")
@click.option("--forward", type=SECONDS, default=1 / 3, help="Seconds of a forward pass on a rank  [default: 1/3]")
@click.option("--input", "input_s", type=SECONDS, default=1 / 3, help="Of the gradient of inputs  [default: 1/3]")
@click.option("--weight", type=SECONDS, default=1 / 3, help="Of the gradient of weights  [default: 1/3]")
@click.option(
    "--delay", "delays", multiple=True, metavar="BOUNDARY:SECONDS", help="After rank BOUNDARY - 1, e.g. 8:0.005."
)
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the timeline of --kind to this .svg file.")
@print_result
def schedule(
    stages: int, micro_batches: int, kind: str | None, chunks: int | None, delays: tuple[str, ...], plot: str | None,
    **seconds: float,
) -> CommandResult:  # fmt: skip
    """Simulate pipeline schedules: step time, bubble and activations in flight."""
    from lakh import storage
    from lakh.planner.schedules.drawing import timeline_svg
    from lakh.planner.schedules.orders import LOOPED, SCHEDULE_NAMES, build_schedule, extra_warm_up
    from lakh.planner.schedules.timeline import OperationSeconds, simulate_schedule

    if plot and not (kind and plot.endswith(".svg")):
        raise UserError(f"--plot {plot}", "draws one schedule as .svg", "give --kind and a name that ends in .svg")
    lasts = OperationSeconds(forward=seconds["forward"], input=seconds["input_s"], weight=seconds["weight"])
    between = _delays(delays, stages)
    built, refused = [], {}
    for name in [kind] if kind else SCHEDULE_NAMES:
        looped = name in LOOPED
        try:
            built.append(
                (name, build_schedule(name, stages, micro_batches, (chunks or 2) if looped else _one(kind, chunks)))
            )
        except UserError as error:
            if kind:
                raise
            refused[name] = f"{error.found}; {error.todo}"
    if any(between) and kind in (None, "1f1b"):
        deeper = extra_warm_up(between, lasts.total)
        built.append(("1f1b, deeper warm-up", build_schedule("1f1b", stages, micro_batches, warm_up=deeper)))
    rows = []
    for name, one in built:
        found = simulate_schedule(one, lasts, between)
        peak = max(found.peak_in_flight(rank) for rank in range(stages))
        rows.append({"schedule": name, "time_s": found.total_s, "bubble": found.bubble_share, "peak": peak,
                     "copies": one.copies, "idle_s": [found.idle_s(rank) for rank in range(stages)]})  # fmt: skip
        if plot and len(rows) == 1:  # the row that --kind names
            storage.write_bytes(plot, timeline_svg(found).encode())
    data = {
        "schedules": rows,
        "refused": refused,
        "ideal_s": micro_batches * lasts.total,
        "plot": plot,
        "simulated": True,
    }
    return CommandResult(data, lambda: _page(data))


def _one(kind: str | None, chunks: int | None) -> int:
    """Chunks of a schedule that has one stage per rank: what was asked for, if it was asked for alone."""
    return chunks or 1 if kind else 1


def _delays(texts: tuple[str, ...], stages: int) -> list[float]:
    between = [0.0] * (stages - 1)
    for text in texts:
        boundary, _, delay_s = text.partition(":")
        try:
            number, value = int(boundary), float(delay_s)
        except ValueError:
            raise UserError(f"--delay {text}", "is not BOUNDARY:SECONDS", "write e.g. 8:0.005") from None
        if not 1 <= number < stages or not value >= 0:
            found = f"boundary {number}, {value:g} s, for {stages} ranks"
            raise UserError(f"--delay {text}", found, f"give a boundary from 1 to {stages - 1} and seconds")
        between[number - 1] = value
    return between


def _page(data: dict[str, Any]) -> Any:
    from rich.console import Group

    rows = [
        (row["schedule"], f"{row['time_s']:.4g}", f"{row['bubble']:.1%}", f"{row['peak']:g}", row["copies"])
        for row in sorted(data["schedules"], key=lambda row: row["time_s"])
    ]
    head = ["schedule (simulated)", "step s", "bubble", "micro-batches held", "copies of the weights"]
    lines = [f"{name}: {why}" for name, why in data["refused"].items()]
    if data["plot"]:
        lines.append(f"wrote {data['plot']}")
    return Group(table(head, rows, f"Without a bubble: {data['ideal_s']:.4g} s"), *lines)
