"""lakh eval: score a model, or samples, on code benchmarks in a sandbox."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from lakh.cli.face import Answer, answers, console, table
from lakh.cli.lazy import DefaultGroup
from lakh.errors import UserError
from lakh.evals.generate import Generator, check_request, generate, load_engine, origin_from, origin_of
from lakh.evals.journal import Journal
from lakh.evals.protocol import Origin
from lakh.evals.reproduce import CANONICAL
from lakh.evals.run import Result
from lakh.evals.run import score as score_samples
from lakh.evals.samples import Sample, canonical_samples, read_samples
from lakh.evals.sandbox import RUNGS, Sandbox
from lakh.evals.task import Task
from lakh.evals.tasks import TASKS, load_task

__all__ = [
    "DATA_OPTION",
    "LIMIT_OPTION",
    "bar",
    "common",
    "evaluate",
    "generated",
    "make_sandbox",
    "sampling_options",
    "show",
    "split_names",
    "task_folder",
]

BITS_PER_BYTE = "bits-per-byte"
DATA_OPTION = click.option("--data", metavar="PATH", help="The benchmark's file, or the folder it lies in.")
LIMIT_OPTION = click.option("--limit", type=click.IntRange(min=1), metavar="N", help="The first N problems only.")


# Options of the default command may come first: `lakh eval --tasks humaneval MODEL`.
@click.group(cls=DefaultGroup, context_settings={"ignore_unknown_options": True})
def evaluate() -> None:
    """Score a model, or samples, on code benchmarks in a sandbox."""


evaluate.default = "model"


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


@evaluate.command()
@click.argument("model")
@asking_options
@common
@answers
def model(
    model: str, tasks: str, n: int, data: str | None, limit: int | None, out: str | None, workers: int | None,
    rung: str | None, unsafe: bool, **asked: Any,
) -> Answer:  # fmt: skip
    """Generate completions with a model and score them.

    MODEL is a run, a checkpoint, a Hugging Face folder, or the URL of an endpoint that speaks OpenAI's completions.
    This is the default: lakh eval MODEL --tasks humaneval
    """
    names = split_names(tasks)
    origin = origin_from(model, **asked)
    blocks: list[dict[str, Any]] = []
    if BITS_PER_BYTE in names:
        blocks.append(_bits_per_byte(model, data, limit))
    loaded = [load_task(name, data).first(limit) for name in names if name != BITS_PER_BYTE]
    for task in loaded:
        check_request(task, origin, n)
    if loaded:
        with _sandbox_or_elsewhere(unsafe, rung) as sandbox:  # before the model: a missing one should cost no minutes
            engine = load_engine(model, chat=asked["chat"], served_name=asked["served_name"])
            for task in loaded:
                folder = None if out is None else task_folder(out, task, loaded)
                with (
                    generated(engine, task, origin, n, folder) as samples,
                    bar(f"{task.name}: running", len(samples)) as progress,
                ):
                    result = score_samples(
                        task, samples, sandbox, origin, workers=workers, progress=progress, out=folder
                    )
                blocks.append(result.as_dict())
    return show(blocks)


@evaluate.command()
@click.argument("samples", required=False)
@click.option("--task", "name", required=True, help="Name of the benchmark, e.g. humaneval.")
@click.option("--canonical", is_flag=True, help="Score the benchmark's own solutions: a test of the harness.")
@click.option("--partial", is_flag=True, help="Allow problems without a sample, left out, and more of some.")
@click.option("--n", type=click.IntRange(min=1), help="Refuse a file that has not so many samples of each problem.")
@click.option("--cpu-limit", type=click.IntRange(min=1), metavar="S", help="CPU seconds; default: by the reference.")
@common
@answers
def score(
    samples: str | None, name: str, canonical: bool, partial: bool, n: int | None, cpu_limit: int | None,
    data: str | None, limit: int | None, out: str | None, workers: int | None, rung: str | None, unsafe: bool,
) -> Answer:  # fmt: skip
    """Score completions from a JSONL file of {task_id, completion}."""
    if (samples is None) != canonical:
        raise UserError("lakh eval score", "takes either a samples file or --canonical", "give one of them")
    task = load_task(name, data)
    if samples is None:
        task = task.first(limit)
        origin, given = Origin(CANONICAL), canonical_samples(task)
        if not given:
            raise UserError(f"task {name}", "has no reference solutions here", "score samples instead")
    else:
        given = read_samples(samples, task, partial=partial, n=n)
        origin = origin_of(samples, given)
        kept = {problem.id for problem in task.first(limit).problems}
        given = [sample for sample in given if sample.task_id in kept]
        if not given:
            raise UserError(samples, f"has no sample for the first {limit} problems", "raise --limit")
    with make_sandbox(unsafe, rung) as sandbox, bar(f"{task.name}: running", len(given)) as progress:
        result = score_samples(
            task, given, sandbox, origin, cpu_s=cpu_limit, workers=workers, progress=progress, out=out
        )
    return show([result.as_dict()], result)


@evaluate.command("tasks")
@answers
def list_tasks() -> Answer:
    """List the benchmarks by name."""
    names = [*TASKS, BITS_PER_BYTE]
    return Answer({"tasks": names}, "\n".join(names))


def split_names(tasks: str) -> list[str]:
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise UserError(f"--tasks {tasks}", "names no task, or one of them twice", "write e.g. --tasks humaneval")
    return names


def task_folder(out: str, task: Task, tasks: Sequence[Task]) -> str:
    """Where a task's files go: `out` itself for the only one."""
    return out if len(tasks) == 1 else f"{out.rstrip('/')}/{task.name}"


@contextlib.contextmanager
def generated(engine: Generator, task: Task, origin: Origin, n: int, folder: str | None) -> Iterator[list[Sample]]:
    """n samples of every problem, with a bar; kept in a journal in `folder` until the block ends well."""
    key = {"task": task.name, "data": task.data_sha256, "problems": len(task.problems), **asdict(origin)}
    journal = Journal(f"{folder}/generated.journal.jsonl" if folder else None, key)
    with contextlib.closing(journal):
        with bar(f"{task.name}: generating", n * len(task.problems)) as progress:
            samples = generate(engine, task, origin, n=n, progress=progress, journal=journal)
        yield samples
        journal.finish()


def make_sandbox(unsafe: bool, rung: str | None = None) -> Sandbox:
    if unsafe:
        console().print("warning: --unsafe runs model-written code with your rights and your network", style="yellow")
    return Sandbox.choose(unsafe=unsafe, rung=rung)


def _sandbox_or_elsewhere(unsafe: bool, rung: str | None) -> Sandbox:
    try:
        return make_sandbox(unsafe, rung)
    except UserError as error:
        todo = f"{error.todo}; or keep the completions with lakh eval generate, and score them on another machine"
        raise UserError(error.where, error.found, todo) from None


@contextlib.contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)


def _bits_per_byte(model: str, data: str | None, limit: int | None) -> dict[str, Any]:
    from lakh.evals.perplexity import measure
    from lakh.evals.tasks.lines import source_texts

    texts = source_texts(data, BITS_PER_BYTE)[:limit]
    with bar(BITS_PER_BYTE, len(texts)) as progress:
        return measure(model, texts, progress=progress).as_dict()


def show(results: list[dict[str, Any]], failures_of: Result | None = None) -> Answer:
    """One table per result, its protocol line below; for people also the first problems that did not pass."""
    from rich.console import Group
    from rich.text import Text

    blocks: list[Any] = []
    for data in results:
        if "bits_per_byte" in data:
            keys = ("bits_per_byte", "perplexity_per_token", "tokens", "bytes", "documents", "seconds")
            rows = [(key, data[key]) for key in keys]
        else:
            rows = _score_rows(data)
        blocks += [
            table(["", "value"], rows, title=data["task"]),
            Text(data["protocol"], no_wrap=True, overflow="ignore"),
        ]
    if failures_of is not None:
        pairs = zip(failures_of.samples, failures_of.verdicts, strict=True)
        failed = [(sample.task_id, v.kind, v.detail[:90]) for sample, v in pairs if not v.passed][:20]
        if failed:
            blocks.append(table(["problem", "ended as", "why"], failed, title="did not pass (at most 20 are shown)"))
    return Answer(results[0] if len(results) == 1 else {"results": results}, Group(*blocks))


def _score_rows(data: dict[str, Any]) -> list[tuple[str, Any]]:
    if data["sandbox_errors"]:
        errors = f"warning: {data['sandbox_errors']} of {data['total']} programs did not run (sandbox_error)"
        console().print(f"{errors}: the score is too low", style="yellow")
    rows: list[tuple[str, Any]] = [("passed", f"{data['passed']} of {data['total']}")]
    rows += [(f"pass@{k}", f"{value:.4f}") for k, value in data["pass_at_k"].items()]
    if data["interval"]:
        rows += [("pass@1, 95 % interval", "{:.4f} - {:.4f}".format(*data["interval"]))]
    rows += [(kind, count) for kind, count in data["kinds"].items() if kind != "passed" and count]
    return [*rows, ("seconds", f"{data['seconds']:.1f}")]


from lakh.cli import eval_generate, eval_results  # noqa: E402, F401 - their commands join this group
