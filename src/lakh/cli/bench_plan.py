"""lakh bench plan: how fast and how right the planner answers, beside Calculon where a checkout is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Group

from lakh.cli.bench_result import keep, machine
from lakh.cli.output import CommandResult, console, print_result, table

__all__ = ["plan"]


@click.command("plan")
@click.option("--calculon", type=click.Path(file_okay=False), help="A checkout of Calculon, timed in the same run.")
@click.option(
    "--points", type=click.Path(dir_okay=False), help="CSV of published speeds: also compares errors on unseen rows."
)
@click.option("--repeats", type=click.IntRange(min=3), default=20, show_default=True, help="Estimates of each system.")
@click.option("--out", type=click.Path(file_okay=False), help="Also keep a dated result file in this folder.")
@print_result
def plan(calculon: str | None, points: str | None, repeats: int, out: str | None) -> CommandResult:
    """Layouts searched and estimates made per second, beside Calculon."""
    from lakh.errors import UserError
    from lakh.planner.bench import bench_plan
    from lakh.planner.calculon import compare
    from lakh.planner.points import read_points

    if points and not calculon:
        raise UserError("--points", "compares with Calculon", "give --calculon CHECKOUT too, or use lakh plan validate")
    rows = bench_plan(calculon, repeats)
    data: dict[str, Any] = {"machine": machine(), "rows": rows}
    pages = [table(list(rows[0]), [list(row.values()) for row in rows])]
    if calculon and points:
        with console().status("asking Calculon about every row, and tuning it"):
            found = compare(read_points(points).kept, calculon)
        data["accuracy"] = {"rows": found.rows, "left_out": dict(found.left_out), "tuned_by": found.scales}
        pages.append(_accuracy(data["accuracy"]))
    if out:
        options = (" --calculon CHECKOUT" if calculon else "") + (" --points POINTS.csv" if points else "")
        data["file"] = keep(Path(out), "plan", f"lakh bench plan{options} --repeats {repeats}", data)
        if "accuracy" in data:
            data["accuracy_file"] = keep(
                Path(out), "plan-calculon", f"lakh bench plan{options}", data | {"rows": found.rows}
            )
    return CommandResult(data, Group(*pages))


def _accuracy(accuracy: dict[str, Any]) -> Any:
    head = ["source (GPU type)", "system", "rows", "MAPE", "median", "bias", "tau in clusters"]
    rows = [
        [r["source"], r["system"], r["n"], f"{r['mape']:.1%}", f"{r['median_ape']:.1%}", f"{r['bias']:+.1%}",
         "" if r["kendall_tau"] is None else f"{r['kendall_tau']:.2f}"]
        for r in accuracy["rows"]
    ]  # fmt: skip
    words = [f"left out, {why}: {n}" for why, n in accuracy["left_out"].items() if n]
    return Group(table(head, rows, "Rows that no fit has seen, and that both can describe"), "\n".join(words))
