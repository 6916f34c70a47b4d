"""lakh eval generate: completions now, here; scores later, on a machine with a sandbox."""

from __future__ import annotations

import time
from typing import Any

import click

from lakh.cli.eval_options import DATA_OPTION, LIMIT_OPTION, asking_options, split_names, task_folder
from lakh.cli.eval_show import generated
from lakh.cli.output import CommandResult, print_result, table
from lakh.evals.generate import check_request, load_engine, origin_from, write_generated
from lakh.evals.tasks import load_task

__all__ = ["generate"]


@click.command()
@click.argument("model")
@asking_options
@DATA_OPTION
@LIMIT_OPTION
@click.option("--out", required=True, metavar="DIR", help="For samples.jsonl; with several tasks, a folder for each.")
@print_result
def generate(
    model: str, tasks: str, n: int, data: str | None, limit: int | None, out: str, **asked: Any
) -> CommandResult:
    """Generate completions with a model and keep them, without running any.

    Needs no sandbox: lakh eval score DIR/samples.jsonl --task NAME runs them, here or elsewhere, and its result tells
    how they were made. Given again, the command goes on where it was stopped.
    """
    origin = origin_from(model, **asked)
    loaded = [load_task(name, data).first(limit) for name in split_names(tasks)]
    for task in loaded:
        check_request(task, origin, n)
    engine = load_engine(model, chat=asked["chat"], served_name=asked["served_name"])
    rows: list[dict[str, Any]] = []
    for task in loaded:
        folder = task_folder(out, task, loaded)
        began_s = time.monotonic()
        with generated(engine, task, origin, n, folder) as samples:
            seconds = time.monotonic() - began_s
            path = write_generated(folder, task, origin, samples, seconds=seconds)
        rows.append({"task": task.name, "samples": len(samples), "seconds": round(seconds, 3), "file": path})
    words = table(["task", "samples", "seconds", "file"], [list(row.values()) for row in rows])
    return CommandResult({"generated": rows}, words)
