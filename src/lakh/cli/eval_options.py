"""Options that the commands of lakh eval share, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from lakh.cli.output import console
from lakh.errors import UserError
from lakh.evals.sandbox import RUNGS, Sandbox
from lakh.evals.task import Task

__all__ = [
    "DATA_OPTION",
    "LIMIT_OPTION",
    "RECALIBRATE_OPTION",
    "TEXTS_OPTION",
    "asking_options",
    "common",
    "make_sandbox",
    "sampling_options",
    "split_names",
    "task_folder",
]

DATA_OPTION = click.option("--data", metavar="PATH", help="The benchmark's file, or the folder it lies in.")
LIMIT_OPTION = click.option("--limit", type=click.IntRange(min=1), metavar="N", help="The first N problems only.")

RECALIBRATE_OPTION = click.option(
    "--recalibrate", is_flag=True, help="Measure the reference solutions again, whatever is kept."
)
TEXTS_OPTION = click.option("--texts", metavar="PATH", help="Code for bits-per-byte; default: what --data says.")


def common(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--unsafe", is_flag=True, help="Run without a sandbox. Model-written code gets your rights."),
        click.option("--sandbox", "rung", type=click.Choice(RUNGS), help="This rung only; default: the strongest."),
        click.option("--workers", type=click.IntRange(min=1), help="Programs at one time; default: one per CPU."),
        click.option("--out", metavar="DIR", help="Keep samples, verdicts and result.json there; go on if stopped."),
        LIMIT_OPTION,
        DATA_OPTION,
    ):
        function = option(function)
    return function


def sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    top_p = click.FloatRange(min=0, max=1, min_open=True)
    for option in (
        click.option(
            "--max-tokens", default=256, show_default=True, type=click.IntRange(min=1), help="Per completion."
        ),
        click.option("--seed", default=0, show_default=True, type=int, help="Of the sampling."),
        click.option("--top-p", default=1.0, show_default=True, type=top_p),
        click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0)),
        click.option("--n", default=1, show_default=True, type=click.IntRange(min=1), help="Samples per problem."),
        click.option("--tasks", required=True, help="Names with commas between them, e.g. humaneval,mbpp-sanitized."),
    ):
        function = option(function)
    return function


def asking_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """How a model is asked; what `origin_from` takes."""
    for option in (
        click.option("--fill-order", type=click.Choice(["psm", "spm"]), help="Of the parts around a hole."),
        click.option("--strip-prompts", is_flag=True, help="Leave the white space at a prompt's end to the model."),
        click.option("--served-name", metavar="NAME", help="Of the model at an endpoint; default: the first it lists."),
        click.option("--chat", is_flag=True, help="Ask an endpoint's chat, and take the code block of its answer."),
    ):
        function = option(function)
    return sampling_options(function)


def split_names(tasks: str) -> list[str]:
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise UserError(f"--tasks {tasks}", "names no task, or one of them twice", "write e.g. --tasks humaneval")
    return names


def task_folder(out: str, task: Task, tasks: Sequence[Task]) -> str:
    """Where a task's files go: `out` itself for the only one."""
    return out if len(tasks) == 1 else f"{out.rstrip('/')}/{task.name}"


def make_sandbox(unsafe: bool, rung: str | None = None, *, workers: int = 1) -> Sandbox:
    if unsafe:
        console().print("warning: --unsafe runs model-written code with your rights and your network", style="yellow")
    return Sandbox.choose(unsafe=unsafe, rung=rung, workers=workers)
