"""lakh eval: score a model, or samples, on code benchmarks in a sandbox."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import click

from lakh.cli.face import Answer, answers, console, table
from lakh.cli.lazy import DefaultGroup
from lakh.errors import UserError
from lakh.evals.generate import check_request, generate, load_engine
from lakh.evals.protocol import Origin
from lakh.evals.run import Result, write_result
from lakh.evals.run import score as score_samples
from lakh.evals.samples import canonical_samples, read_samples
from lakh.evals.sandbox import Sandbox
from lakh.evals.tasks import load_task

__all__ = ["evaluate"]


# Options of the default command may come first: `lakh eval --tasks humaneval MODEL`.
@click.group(cls=DefaultGroup, context_settings={"ignore_unknown_options": True})
def evaluate() -> None:
    """Score a model, or samples, on code benchmarks in a sandbox."""


evaluate.default = "model"


def common(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--unsafe", is_flag=True, help="Run without a sandbox. Model-written code gets your rights."),
        click.option("--workers", type=click.IntRange(min=1), help="Programs at one time; default: one per CPU."),
        click.option("--out", metavar="DIR", help="Keep samples, verdicts and result.json there."),
        click.option("--limit", type=click.IntRange(min=1), metavar="N", help="The first N problems only."),
        click.option("--data", metavar="PATH", help="The benchmark's file, or the folder it lies in."),
    ):
        function = option(function)
    return function


@evaluate.command()
@click.argument("model")
@click.option("--tasks", required=True, help="Names with commas between them, e.g. humaneval.")
@click.option("--n", default=1, show_default=True, type=click.IntRange(min=1), help="Samples per problem.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0))
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(min=0, max=1, min_open=True))
@click.option("--seed", default=0, show_default=True, type=int, help="Of the sampling.")
@click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(min=1), help="Per completion.")
@common
@answers
def model(
    model: str, tasks: str, n: int, temperature: float, top_p: float, seed: int, max_tokens: int, data: str | None,
    limit: int | None, out: str | None, workers: int | None, unsafe: bool,
) -> Answer:  # fmt: skip
    """Generate completions with a model and score them.

    This is the default: lakh eval MODEL --tasks humaneval
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise UserError(f"--tasks {tasks}", "names no task, or one of them twice", "write e.g. --tasks humaneval")
    loaded = [load_task(name, data).first(limit) for name in names]
    origin = Origin(model, temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    for task in loaded:
        check_request(task, origin, n)
    with _sandbox(unsafe) as sandbox:  # before the model: a missing sandbox should cost no minutes
        engine = load_engine(model)
        results = []
        for task in loaded:
            with _bar(f"{task.name}: generating", n * len(task.problems)) as progress:
                samples = generate(engine, task, origin, n=n, progress=progress)
            with _bar(f"{task.name}: running", len(samples)) as progress:
                result = score_samples(task, samples, sandbox, origin, workers=workers, progress=progress)
            if out:
                write_result(out if len(loaded) == 1 else f"{out.rstrip('/')}/{task.name}", result)
            results.append(result)
    return _answer(results)


@evaluate.command()
@click.argument("samples", required=False)
@click.option("--task", "name", required=True, help="Name of the benchmark, e.g. humaneval.")
@click.option("--canonical", is_flag=True, help="Score the benchmark's own solutions: a test of the harness.")
@click.option("--partial", is_flag=True, help="Allow problems without a sample; they are left out of the score.")
@common
@answers
def score(
    samples: str | None, name: str, canonical: bool, partial: bool, data: str | None, limit: int | None,
    out: str | None, workers: int | None, unsafe: bool,
) -> Answer:  # fmt: skip
    """Score completions from a JSONL file of {task_id, completion}."""
    if (samples is None) != canonical:
        raise UserError("lakh eval score", "takes either a samples file or --canonical", "give one of them")
    task = load_task(name, data)
    if samples is None:
        task = task.first(limit)
        origin, given = Origin("canonical solutions"), canonical_samples(task)
    else:
        origin, given = Origin(samples), read_samples(samples, task, partial=partial)
        kept = {problem.id for problem in task.first(limit).problems}
        given = [sample for sample in given if sample.task_id in kept]
        if not given:
            raise UserError(samples, f"has no sample for the first {limit} problems", "raise --limit")
    with _sandbox(unsafe) as sandbox, _bar(f"{task.name}: running", len(given)) as progress:
        result = score_samples(task, given, sandbox, origin, workers=workers, progress=progress)
    if out:
        write_result(out, result)
    return _answer([result])


def _sandbox(unsafe: bool) -> Sandbox:
    if unsafe:
        console().print("warning: --unsafe runs model-written code with your rights and your network", style="yellow")
    return Sandbox.choose(unsafe=unsafe)


@contextlib.contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def _answer(results: list[Result]) -> Answer:
    from rich.console import Group
    from rich.text import Text

    blocks: list[Any] = []
    for result in results:
        data = result.as_dict()
        if data["sandbox_errors"]:
            errors = f"warning: {data['sandbox_errors']} of {data['total']} programs did not run (sandbox_error)"
            console().print(f"{errors}: the score is too low", style="yellow")
        rows: list[tuple[str, Any]] = [("passed", f"{data['passed']} of {data['total']}")]
        rows += [(f"pass@{k}", f"{value:.4f}") for k, value in data["pass_at_k"].items()]
        rows += [("pass@1, 95 % interval", "{:.4f} - {:.4f}".format(*data["interval"]))]
        rows += [(kind, count) for kind, count in data["kinds"].items() if kind != "passed" and count]
        rows += [("seconds", f"{data['seconds']:.1f}")]
        blocks += [table(["", "value"], rows, title=data["task"]), Text(data["protocol"])]
    everything = [result.as_dict() for result in results]
    return Answer(everything[0] if len(everything) == 1 else {"results": everything}, Group(*blocks))
