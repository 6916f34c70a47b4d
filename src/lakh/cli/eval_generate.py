"""lakh eval generate: completions now, here; scores later, on a machine with a sandbox."""

from __future__ import annotations

import time
from typing import Any

import click

from lakh.cli.eval import DATA_OPTION, LIMIT_OPTION, evaluate, generated, sampling_options, split_names, task_folder
from lakh.cli.face import Answer, answers, table
from lakh.evals.generate import check_request, load_engine, origin_from, write_generated
from lakh.evals.tasks import load_task

__all__ = ["generate"]


@evaluate.command()
@click.argument("model")
@sampling_options
@click.option("--chat", is_flag=True, help="Ask an endpoint's chat, and take the code block of its answer.")
@click.option("--served-name", metavar="NAME", help="Of the model at an endpoint; default: the first it lists.")
@DATA_OPTION
@LIMIT_OPTION
@click.option("--out", required=True, metavar="DIR", help="For samples.jsonl; with several tasks, a folder for each.")
@answers
def generate(
    model: str, tasks: str, n: int, temperature: float, top_p: float, seed: int, max_tokens: int, chat: bool,
    served_name: str | None, data: str | None, limit: int | None, out: str,
) -> Answer:  # fmt: skip
    """Generate completions with a model and keep them, without running any.

    Needs no sandbox: lakh eval score DIR/samples.jsonl --task NAME runs them, here or elsewhere, and its result tells
    how they were made. Given again, the command goes on where it was stopped.
    """
    origin = origin_from(
        model,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        max_tokens=max_tokens,
        chat=chat,
        served_name=served_name,
    )
    loaded = [load_task(name, data).first(limit) for name in split_names(tasks)]
    for task in loaded:
        check_request(task, origin, n)
    engine = load_engine(model, chat=chat, served_name=served_name)
    rows: list[dict[str, Any]] = []
    for task in loaded:
        folder = task_folder(out, task, loaded)
        began_s = time.monotonic()
        with generated(engine, task, origin, n, folder) as samples:
            seconds = time.monotonic() - began_s
            path = write_generated(folder, task, origin, samples, seconds=seconds)
        rows.append({"task": task.name, "samples": len(samples), "seconds": round(seconds, 3), "file": path})
    words = table(["task", "samples", "seconds", "file"], [list(row.values()) for row in rows])
    return Answer({"generated": rows}, words)
