"""lakh bench plan: how fast the planner answers, beside Calculon where a checkout is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lakh.cli.bench_result import keep, machine
from lakh.cli.face import Answer, answers, table

__all__ = ["plan"]


@click.command("plan")
@click.option("--calculon", type=click.Path(file_okay=False), help="A checkout of Calculon, timed in the same run.")
@click.option("--repeats", type=click.IntRange(min=3), default=20, show_default=True, help="Estimates of each system.")
@click.option("--out", type=click.Path(file_okay=False), help="Also keep a dated result file in this folder.")
@answers
def plan(calculon: str | None, repeats: int, out: str | None) -> Answer:
    """Layouts searched and estimates made per second, beside Calculon."""
    from lakh.planner.bench import bench_plan

    rows = bench_plan(calculon, repeats)
    data: dict[str, Any] = {"machine": machine(), "rows": rows}
    if out:
        command = "lakh bench plan" + (" --calculon CHECKOUT" if calculon else "") + f" --repeats {repeats}"
        data["file"] = keep(Path(out), "plan", command, data)
    return Answer(data, table(list(rows[0]), [list(row.values()) for row in rows]))
