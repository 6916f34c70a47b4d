"""lakh eval diff, reproduce, export, watch, curve: commands on results and samples."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import click

from lakh.cli.complete import complete_runs, complete_tasks
from lakh.cli.eval_options import (
    DATA_OPTION,
    TASK_OPTION,
    TEXTS_OPTION,
    EvalRunOptions,
    load_tasks,
    run_options,
    sampling_options,
    split_names,
)
from lakh.cli.eval_show import bar
from lakh.cli.output import CommandResult, console, print_result, print_warning, table
from lakh.errors import LakhError, UserError
from lakh.evals.perplexity import BITS_PER_BYTE
from lakh.evals.scoring.protocol import Origin
from lakh.evals.tasks import load_task

__all__ = ["curve", "diff", "export", "reproduce", "watch"]

CURVE_CHARS = 30


@click.command()
@click.argument("left")
@click.argument("right")
@print_result
def diff(left: str, right: str) -> CommandResult:
    """Compare two results and test whether the difference is significant."""
    from rich.console import Group
    from rich.text import Text

    from lakh.evals.scoring.compare import compare, read_result

    found = compare(read_result(left), read_result(right))
    rows = [
        (f"left, {found.metric}", found.left),
        (f"right, {found.metric}", found.right),
        ("right - left", f"{found.difference:+.4f}  (95 %: {found.interval[0]:+.4f} to {found.interval[1]:+.4f})"),
        ("p-value", f"{found.p_value:.4g}  ({found.test})"),
        ("documents" if found.metric == "bits per byte" else "problems", found.problems),
        ("gained", f"{len(found.gained)}: {', '.join(found.gained[:8])}"),
        ("lost", f"{len(found.lost)}: {', '.join(found.lost[:8])}"),
    ]
    blocks = [table(["", "value"], rows, title=found.task)]
    if found.settings:
        blocks.append(table(["setting", left, right], found.settings, title="different settings"))
    return CommandResult(asdict(found), Group(*blocks, Text(found.verdict)))


@click.command()
@click.argument("result")
@click.option("--samples", metavar="FILE", help="The samples file, if it has moved.")
@click.option("--task", "task_file", metavar="FILE", help="The task file, for a task of your own.")
@run_options
@print_result
def reproduce(result: str, samples: str | None, task_file: str | None, run: EvalRunOptions) -> CommandResult:
    """Reproduce a result from its protocol and show what differs.

    RESULT is the folder of a result, or a file with its protocol line.
    """
    from lakh.evals.generation.generate import generate, load_engine
    from lakh.evals.scoring.reproduce import read_request
    from lakh.evals.scoring.reproduce import reproduce as score_again

    if run.limit is not None:
        raise UserError("--limit", "a result is reproduced as a whole", "remove --limit")
    request = read_request(result, run.data, samples=samples, task_file=task_file)
    given, origin = request.samples, request.origin
    with run.sandbox() as sandbox, bar(request.task.name) as stage:
        if given is None:
            engine = load_engine(origin.source, chat=origin.form == "chat", served_name=origin.served_name)
            generating = stage("generating", request.n * len(request.task.problems))
            given = generate(engine, request.task, origin, n=request.n, progress=generating)
        running = stage("running", len(given))
        again = score_again(request, given, sandbox, workers=run.workers, progress=running, out=run.out)
    summary = again.result.summary
    text = "identical" if again.is_identical else f"{len(again.changed)} of {len(given)} verdicts differ"
    if again.new_completions:
        text = "the model wrote other completions than the first time"
    lines = [f"{text}: {summary.passed} of {summary.total} passed"]
    lines += [f"  {key}: {before!r} -> {now!r}" for key, (before, now) in again.settings.items()]
    document = {
        "identical": again.is_identical,
        "changed": again.changed,
        "settings_that_differ": again.settings,
        "result": again.result.as_dict(),
    }
    return CommandResult(document, "\n".join(lines), exit_code=0 if again.is_identical else 65)


@click.command()
@click.argument("samples")
@TASK_OPTION
@DATA_OPTION
@click.option("--out", required=True, metavar="FILE", help="JSONL of {task_id, solution}, the form of EvalPlus.")
@click.option("--partial", is_flag=True, help="Allow problems without a sample.")
@print_result
def export(samples: str, name: str, data: str | None, out: str, partial: bool) -> CommandResult:
    """Write samples as whole programs, in the form of EvalPlus."""
    from lakh.evals.generation.samples import export_whole

    count = export_whole(samples, load_task(name, data), out, partial=partial)
    return CommandResult({"samples": count, "file": out}, f"{count} samples -> {out}")


@click.command()
@click.argument("run_dir", shell_complete=complete_runs)
@sampling_options
@click.option("--every", default=1, show_default=True, type=click.IntRange(min=1), help="Only steps divisible by this.")
@click.option("--once", is_flag=True, help="Score the existing checkpoints and exit; default: wait until Ctrl-C.")
@click.option("--poll", default=5.0, show_default=True, type=click.FloatRange(min=0.1), help="Seconds between checks.")
@TEXTS_OPTION
@run_options
@print_result
def watch(
    run_dir: str, tasks: str, n: int, every: int, once: bool, poll: float, texts: str | None, run: EvalRunOptions,
    **sampling: Any,
) -> CommandResult:  # fmt: skip
    """Score the checkpoints of a run as they appear, next to its training."""
    from lakh.evals.tasks.lines import source_texts
    from lakh.evals.watch import watch as follow

    if run.out is not None:
        raise UserError("--out", "results of a run go into the run, under evals/", "remove --out")
    names = split_names(tasks)
    read = source_texts(texts or run.data, BITS_PER_BYTE)[: run.limit] if BITS_PER_BYTE in names else []
    origin = Origin(run_dir, **sampling)
    loaded = load_tasks(names, run.data, run.limit, origin, n)
    columns = ["step", "task", "passed", "total", "pass_at_k", "bits_per_byte", "interval"]
    rows: list[dict[str, Any]] = []

    def on_result(step: int, found: dict[str, Any]) -> None:
        rows.append({"step": step} | {key: found.get(key) for key in columns[1:]})
        text = f"{found['passed']} of {found['total']} passed" if "passed" in found else f"{found['bits_per_byte']:.4f}"
        console().print(f"step {step}: {found['task']} {text}")

    def on_skip(path: str, error: LakhError) -> None:
        print_warning(f"skipped {path}: {error}")

    with run.sandbox() if loaded else nullcontext() as sandbox:  # bits per byte runs no programs
        follow(
            run_dir, loaded, sandbox, origin, n=n, every=every, poll_s=poll, until=lambda: once, texts=read,
            on_result=on_result, on_skip=on_skip, workers=run.workers,
        )  # fmt: skip
    shown = ["step", "task", "passed", "total", "bits_per_byte"]
    text = table(shown, [[row[key] for key in shown] for row in rows]) if rows else "nothing new to score"
    return CommandResult({"results": rows}, text)


@click.command()
@click.argument("run_dir", shell_complete=complete_runs)
@click.option("--task", metavar="NAME", shell_complete=complete_tasks, help="Only this task.")
@print_result
def curve(run_dir: str, task: str | None) -> CommandResult:
    """Show the scores of a run's checkpoints, step by step."""
    from rich.console import Group

    from lakh.evals.watch import bits_per_byte
    from lakh.evals.watch import curve as read_curve

    found = read_curve(run_dir, task)
    bits = [] if task else [{"step": event.step, **event.values} for event in bits_per_byte(run_dir)]
    data = {"points": [asdict(event) for event in found], "bits_per_byte": bits}
    if not found and not bits:
        return CommandResult(data, "nothing is scored yet: lakh eval watch RUN_DIR --task humaneval")

    def cells(value: float | None, largest: float, low: float | None, high: float | None) -> list[str]:
        """The value, its interval and its bar."""
        interval = "" if low is None or high is None else f"{low:.3f} - {high:.3f}"
        return [f"{value or 0.0:.4f}", interval, "█" * round(CURVE_CHARS * (value or 0.0) / largest)]

    blocks = []
    if found:
        best = max(event.pass_at_1 or 0.0 for event in found) or 1.0
        rows = [
            [event.task, event.step, f"{event.passed} of {event.total}",
             *cells(event.pass_at_1, best, event.low, event.high)]
            for event in found
        ]  # fmt: skip
        blocks.append(table(["task", "step", "passed", "pass@1", "95 %", ""], rows))
    if bits:
        most = max(row["bits_per_byte"] for row in bits)
        rows = [[row["step"], *cells(row["bits_per_byte"], most, row["low"], row["high"])] for row in bits]
        blocks.append(table(["step", "bits per byte", "95 %", ""], rows))
    return CommandResult(data, Group(*blocks))
