"""lakh eval: score a model, or samples, on code benchmarks in a sandbox."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from typing import Any

import click

from lakh import storage
from lakh.cli.complete import complete_runs
from lakh.cli.eval_options import (
    DATA_OPTION,
    LIMIT_OPTION,
    RECALIBRATE_OPTION,
    TASK_OPTION,
    TEXTS_OPTION,
    EvalRunOptions,
    load_tasks,
    model_options,
    run_options,
    split_names,
    task_folder,
)
from lakh.cli.eval_results import curve, diff, export, reproduce, watch
from lakh.cli.eval_show import bar, show
from lakh.cli.groups import DefaultGroup
from lakh.cli.output import CommandResult, print_result, table, verbose_option
from lakh.errors import UserError
from lakh.evals.generation.generate import generated, load_engine, origin_from, samples_to_score, write_generated
from lakh.evals.perplexity import BITS_PER_BYTE
from lakh.evals.run import score_samples
from lakh.evals.sandbox import Sandbox
from lakh.evals.tasks import TASKS, load_task

__all__ = ["evaluate"]


class EvalGroup(DefaultGroup):
    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """`--tasks` is the former name of `--task`."""
        return super().parse_args(context, [re.sub("^--tasks(?==|$)", "--task", word) for word in args])


# Options of the default command may come first: `lakh eval --task humaneval MODEL`.
@click.group(cls=EvalGroup, context_settings={"ignore_unknown_options": True})
def evaluate() -> None:
    """Score a model, or samples, on code benchmarks in a sandbox."""


evaluate.default = "model"


@evaluate.command()
@click.argument("model", shell_complete=complete_runs)
@model_options
@TEXTS_OPTION
@RECALIBRATE_OPTION
@run_options
@verbose_option
@print_result
def model(
    model: str, tasks: str, n: int, texts: str | None, recalibrate: bool, run: EvalRunOptions, **settings: Any
) -> CommandResult:
    """Generate completions with a model and score them.

    MODEL is a run, a checkpoint, a Hugging Face folder, or the URL of an OpenAI-compatible endpoint.
    This is the default: lakh eval MODEL --task humaneval
    """
    names = split_names(tasks)
    origin = origin_from(model, **settings)
    results: list[dict[str, Any]] = []
    if BITS_PER_BYTE in names:
        results.append(_bits_per_byte(model, texts or run.data, run.limit))
        if run.out is not None:
            bits_folder = run.out if len(names) == 1 else storage.join(run.out, BITS_PER_BYTE)
            storage.write_bytes(storage.join(bits_folder, "result.json"), f"{json.dumps(results[0])}\n".encode())
    loaded = load_tasks(names, run.data, run.limit, origin, n)
    if loaded:
        with _sandbox_for_model(run) as sandbox:  # first: a missing sandbox should not cost minutes
            engine = load_engine(model, chat=settings["chat"], served_name=settings["served_name"])
            for task in loaded:
                folder = None if run.out is None else task_folder(run.out, task, loaded)
                num_samples = n * len(task.problems)
                with (
                    bar(task.name) as stage,
                    generated(engine, task, origin, n, folder, stage("generating", num_samples)) as samples,
                ):
                    result = score_samples(
                        task, samples, sandbox, origin, workers=run.workers, progress=stage("running", num_samples),
                        calibrating=stage("measuring references", len(task.problems)),
                        recalibrate=recalibrate, out=folder,
                    )  # fmt: skip
                results.append(result.as_dict())
    again = f"lakh eval {shlex.quote(model)} --task {tasks} -v"
    return show(results, next_commands=[f"{again}  # with the protocol; --out DIR keeps samples and verdicts"])


@evaluate.command("generate")
@click.argument("model", shell_complete=complete_runs)
@model_options
@DATA_OPTION
@LIMIT_OPTION
@click.option("--out", required=True, metavar="DIR", help="For samples.jsonl; with several tasks, a folder for each.")
@print_result
def generate_only(
    model: str, tasks: str, n: int, data: str | None, limit: int | None, out: str, **settings: Any
) -> CommandResult:
    """Generate completions with a model and store them, without running any.

    Needs no sandbox. lakh eval score DIR/samples.jsonl --task NAME runs them, here or elsewhere, and its result
    includes how they were made. After a stop, the same command continues where it was.
    """
    origin = origin_from(model, **settings)
    names = split_names(tasks)
    if BITS_PER_BYTE in names:
        raise UserError(f"--task {tasks}", f"{BITS_PER_BYTE} generates nothing", "use lakh eval MODEL --task")
    loaded = load_tasks(names, data, limit, origin, n)
    engine = load_engine(model, chat=settings["chat"], served_name=settings["served_name"])
    rows: list[dict[str, Any]] = []
    for task in loaded:
        folder = task_folder(out, task, loaded)
        began_s = time.monotonic()
        with (
            bar(task.name) as stage,
            generated(engine, task, origin, n, folder, stage("generating", n * len(task.problems))) as samples,
        ):
            seconds = time.monotonic() - began_s
            path = write_generated(folder, task, origin, samples, seconds=seconds)
        rows.append({"task": task.name, "samples": len(samples), "seconds": round(seconds, 3), "file": path})
    text = table(["task", "samples", "seconds", "file"], [list(row.values()) for row in rows])
    return CommandResult({"generated": rows}, text)


@evaluate.command()
@click.argument("samples", required=False)
@TASK_OPTION
@click.option("--canonical", is_flag=True, help="Score the benchmark's own solutions: a test of the harness.")
@click.option("--partial", is_flag=True, help="Allow missing samples and different numbers of samples per problem.")
@click.option("--n", type=click.IntRange(min=1), help="Require this number of samples per problem.")
@click.option("--cpu-limit", type=click.IntRange(min=1), metavar="S", help="CPU seconds; default: by the reference.")
@RECALIBRATE_OPTION
@run_options
@verbose_option
@print_result
def score(
    samples: str | None, name: str, canonical: bool, partial: bool, n: int | None, cpu_limit: int | None,
    recalibrate: bool, run: EvalRunOptions,
) -> CommandResult:  # fmt: skip
    """Score completions from a JSONL file of {task_id, completion}."""
    if recalibrate and cpu_limit is not None:
        raise UserError("lakh eval score", "--cpu-limit leaves nothing to calibrate", "give one of the two")
    if (samples is None) != canonical:
        raise UserError("lakh eval score", "takes either a samples file or --canonical", "give one of them")
    task = load_task(name, run.data)
    origin, given = samples_to_score(samples, task, partial=partial, n=n, limit=run.limit)
    ahead = min(run.workers or os.cpu_count() or 1, len(given))
    with run.sandbox(workers=ahead) as sandbox, bar(task.name) as stage:
        result = score_samples(
            task, given, sandbox, origin, cpu_s=cpu_limit, workers=run.workers, progress=stage("running", len(given)),
            calibrating=stage("measuring references", len({s.task_id for s in given})),
            recalibrate=recalibrate, out=run.out,
        )  # fmt: skip
    kept = f"lakh eval diff OTHER {run.out}" if run.out else "the same command with -v: protocol and failures"
    return show([result.as_dict()], result, [kept])


@evaluate.command("tasks")
@print_result
def list_tasks() -> CommandResult:
    """List the benchmarks by name."""
    names = [*TASKS, BITS_PER_BYTE]
    return CommandResult({"tasks": names}, "\n".join(names))


def _sandbox_for_model(run: EvalRunOptions) -> Sandbox:
    try:
        return run.sandbox()
    except UserError as error:
        todo = f"{error.todo}; or store the completions with lakh eval generate, and score them on another machine"
        raise UserError(error.where, error.found, todo) from None


def _bits_per_byte(model: str, data: str | None, limit: int | None) -> dict[str, Any]:
    from lakh.evals.perplexity import measure
    from lakh.evals.tasks.lines import source_texts

    texts = source_texts(data, BITS_PER_BYTE)[:limit]
    with bar(BITS_PER_BYTE) as stage:
        return measure(model, texts, progress=stage("measuring", len(texts)))


for command in (diff, reproduce, export, watch, curve):
    evaluate.add_command(command)
