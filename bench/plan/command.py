"""lakh bench plan: the speed and accuracy of the planner, beside Calculon if a checkout is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench.harness import out_option, result
from bench.harness.results import write_result
from lakh.cli.output import CommandResult, console, print_result, table
from lakh.errors import UserError

__all__ = ["plan"]


@click.command("plan")
@click.option("--calculon", type=click.Path(file_okay=False), help="A checkout of Calculon to measure in the same run.")
@click.option("--points", type=click.Path(dir_okay=False), help="CSV of published speeds: also compare the errors.")
@click.option("--repeats", type=click.IntRange(min=3), default=20, show_default=True, help="Estimates of each system.")
@click.option("--bars", is_flag=True, help="Only: the planner's targets beside what it reaches; about two minutes.")
@click.option("--pipeline", type=click.IntRange(2, 16), help="Only: pipeline schedules on this many processes.")
@click.option(
    "--products", is_flag=True, help="With --pipeline: operations compute, one core each  [default: they wait]"
)
@click.option(
    "--buildings", is_flag=True, help="Only: collectives of c3 between emulated buildings, beside predictions."
)
@out_option
@print_result
def plan(
    calculon: str | None, points: str | None, repeats: int, pipeline: int | None, products: bool, buildings: bool,
    bars: bool, out: str | None,
) -> CommandResult:  # fmt: skip
    """Measure the speed of the planner, or compare it with Calculon, with real processes or with emulated buildings."""
    from rich.console import Group

    from bench.plan.calculon import compare
    from bench.plan.speed import bench_plan
    from lakh.planner.calibration.measured_points import read_points

    if pipeline:
        return _pipeline(pipeline, products, out)
    if buildings:
        return _buildings(out)
    if bars:
        return _bars(out)
    if points and not calculon:
        raise UserError("--points", "compares with Calculon", "add --calculon CHECKOUT, or use lakh plan validate")
    done = result("plan", bench_plan(calculon, repeats), out)
    if not (calculon and points):
        return done
    with console().status("running and tuning Calculon on every row"):
        found = compare(read_points(points).kept, calculon)
    done.data["accuracy"] = {"rows": found.rows, "left_out": dict(found.left_out), "tuned_by": found.scales}
    if out:
        done.data["accuracy_file"] = write_result(Path(out), "plan-calculon", done.data | {"rows": found.rows})
    return CommandResult(done.data, Group(done.text, _accuracy(done.data["accuracy"])))


def _pipeline(ranks: int, products: bool, out: str | None) -> CommandResult:
    from bench.plan.pipeline import compare_schedules

    with console().status("pipelines") as status:
        rows = compare_schedules(ranks, 4 * ranks, waits=not products, progress=status.update)
    return result("plan-pipeline", rows, out)


def _bars(out: str | None) -> CommandResult:
    from bench.plan.bars import bench_bars

    with console().status("targets") as status:
        rows = bench_bars(log=status.update)
    return result("plan-bars", rows, out)


def _buildings(out: str | None) -> CommandResult:
    from bench.plan.buildings import compare_buildings

    with console().status("buildings") as status:
        rows = compare_buildings(status.update)
    return result("plan-buildings", rows, out)


def _accuracy(accuracy: dict[str, Any]) -> Any:
    from rich.console import Group

    head = ["source (GPU type)", "system", "rows", "MAPE", "median", "bias", "tau in clusters"]
    rows = [
        [r["source"], r["system"], r["n"], f"{r['mape']:.1%}", f"{r['median_ape']:.1%}", f"{r['bias']:+.1%}",
         "" if r["kendall_tau"] is None else f"{r['kendall_tau']:.2f}"]
        for r in accuracy["rows"]
    ]  # fmt: skip
    left_out = [f"left out, {reason}: {n}" for reason, n in accuracy["left_out"].items() if n]
    return Group(table(head, rows, "Rows outside of every fit that both can describe"), "\n".join(left_out))
