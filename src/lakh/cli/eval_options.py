"""Options that the commands of lakh eval share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import click

from lakh.cli.complete import complete_folders, complete_tasks
from lakh.cli.output import print_warning
from lakh.errors import UserError
from lakh.evals.generation.generate import check_request
from lakh.evals.perplexity import BITS_PER_BYTE
from lakh.evals.sandbox import BACKENDS, Sandbox
from lakh.evals.scoring.protocol import Origin
from lakh.evals.task import Task
from lakh.evals.tasks import load_task

__all__ = [
    "DATA_OPTION",
    "LIMIT_OPTION",
    "RECALIBRATE_OPTION",
    "TASK_OPTION",
    "TEXTS_OPTION",
    "EvalRunOptions",
    "load_tasks",
    "model_options",
    "run_options",
    "sampling_options",
    "split_names",
    "task_folder",
]

DATA_OPTION = click.option("--data", metavar="PATH", help="File of the benchmark, or the folder that holds it.")
LIMIT_OPTION = click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N problems.")
RECALIBRATE_OPTION = click.option("--recalibrate", is_flag=True, help="Measure reference solutions again.")
TASK_OPTION = click.option(
    "--task",
    "name",
    required=True,
    metavar="NAME",
    shell_complete=complete_tasks,
    help="Name of the benchmark, e.g. humaneval, or a task file of your own (.toml, .json, .py).",
)
TEXTS_OPTION = click.option("--texts", metavar="PATH", help="Code for bits-per-byte; default: the path of --data.")

Command = Callable[..., Any]


def _together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """One decorator for several options, listed in the order of the help text."""

    def decorate(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@dataclass(frozen=True)
class EvalRunOptions:
    """What and how to run, for commands that run programs."""

    data: str | None
    limit: int | None
    out: str | None
    workers: int | None
    backend: str | None
    packages: str | None
    unsafe: bool

    def sandbox(self, *, workers: int = 1) -> Sandbox:
        if self.unsafe:
            print_warning("--unsafe runs model-written code with your rights and your network")
        names = [name.strip() for name in (self.packages or "").split(",") if name.strip()]
        return Sandbox.choose(unsafe=self.unsafe, backend=self.backend, workers=workers, package_names=names)


_RUN_OPTIONS = _together(
    DATA_OPTION,
    LIMIT_OPTION,
    click.option(
        "--out",
        metavar="DIR",
        shell_complete=complete_folders,
        help="Write samples, verdicts and result.json there; resumes after a stop.",
    ),
    click.option("--workers", type=click.IntRange(min=1), help="Programs at one time; default: one per CPU."),
    click.option("--sandbox", "backend", type=click.Choice(BACKENDS), help="Isolation; default: the strongest here."),
    click.option(
        "--packages",
        metavar="NAMES",
        help="Installed packages that programs may import, e.g. numpy,pandas.",
    ),
    click.option("--unsafe", is_flag=True, help="Run without a sandbox: model-written code gets your rights."),
)


def run_options(function: Command) -> Command:
    """Add the options of EvalRunOptions to a command, which gets them as `run`."""

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        run = EvalRunOptions(**{field.name: values.pop(field.name) for field in fields(EvalRunOptions)})
        return function(run=run, **values)

    return _RUN_OPTIONS(command)


sampling_options = _together(
    click.option(
        "--task",
        "tasks",
        required=True,
        metavar="NAMES",
        shell_complete=complete_tasks,
        help="Benchmarks or task files of your own, separated by commas, e.g. humaneval,mbpp-sanitized.",
    ),
    click.option("--n", default=1, show_default=True, type=click.IntRange(min=1), help="Samples per problem."),
    click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0)),
    click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(min=0, max=1, min_open=True)),
    click.option("--seed", default=0, show_default=True, type=int, help="Seed of the sampling."),
    click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(min=1), help="Per completion."),
)
# What generation.generate.origin_from takes.
model_options = _together(
    sampling_options,
    click.option("--chat", is_flag=True, help="Use an endpoint's chat API and take the code block of its answer."),
    click.option("--served-name", metavar="NAME", help="Model at an endpoint; default: the first that it lists."),
    click.option("--strip-prompts", is_flag=True, help="Remove trailing white space from prompts."),
    click.option("--fill-order", type=click.Choice(["psm", "spm"]), help="Order of prefix and suffix for infilling."),
)


def split_names(tasks: str) -> list[str]:
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise UserError(f"--task {tasks}", "names no task, or one of them twice", "write e.g. --task humaneval")
    return names


def load_tasks(names: Sequence[str], data: str | None, limit: int | None, origin: Origin, n: int) -> list[Task]:
    """The tasks, bits-per-byte excepted, after checking that they can be generated with these settings."""
    tasks = [load_task(name, data).first(limit) for name in names if name != BITS_PER_BYTE]
    for task in tasks:
        check_request(task, origin, n)
    return tasks


def task_folder(out: str, task: Task, tasks: Sequence[Task]) -> str:
    """The folder for a task's files: `out` itself if there is only one task."""
    return out if len(tasks) == 1 else f"{out.rstrip('/')}/{task.name}"
