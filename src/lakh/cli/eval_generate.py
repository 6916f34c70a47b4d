"""lakh eval generate: completions now, scores later on a machine with a sandbox."""

from __future__ import annotations

import time
from typing import Any

import click

from lakh.cli.eval_options import (
    BITS_PER_BYTE,
    DATA_OPTION,
    LIMIT_OPTION,
    load_tasks,
    model_options,
    split_names,
    task_folder,
)
from lakh.cli.eval_show import bar
from lakh.cli.output import CommandResult, print_result, table
from lakh.errors import UserError
from lakh.evals.generation.generate import generated, load_engine, origin_from, write_generated

__all__ = ["generate"]


@click.command()
@click.argument("model")
@model_options
@DATA_OPTION
@LIMIT_OPTION
@click.option("--out", required=True, metavar="DIR", help="For samples.jsonl; with several tasks, a folder for each.")
@print_result
def generate(
    model: str, tasks: str, n: int, data: str | None, limit: int | None, out: str, **settings: Any
) -> CommandResult:
    """Generate completions with a model and store them, without running any.

    Needs no sandbox. lakh eval score DIR/samples.jsonl --task NAME runs them, here or elsewhere, and its result
    includes how they were made. After a stop, the same command continues where it was.
    """
    origin = origin_from(model, **settings)
    names = split_names(tasks)
    if BITS_PER_BYTE in names:
        raise UserError(f"--tasks {tasks}", f"{BITS_PER_BYTE} generates nothing", "use lakh eval MODEL --tasks")
    loaded = load_tasks(names, data, limit, origin, n)
    engine = load_engine(model, chat=settings["chat"], served_name=settings["served_name"])
    rows: list[dict[str, Any]] = []
    for task in loaded:
        folder = task_folder(out, task, loaded)
        began_s = time.monotonic()
        with (
            bar(f"{task.name}: generating", n * len(task.problems)) as progress,
            generated(engine, task, origin, n, folder, progress) as samples,
        ):
            seconds = time.monotonic() - began_s
            path = write_generated(folder, task, origin, samples, seconds=seconds)
        rows.append({"task": task.name, "samples": len(samples), "seconds": round(seconds, 3), "file": path})
    text = table(["task", "samples", "seconds", "file"], [list(row.values()) for row in rows])
    return CommandResult({"generated": rows}, text)
