"""lakh eval diff, reproduce, export, watch, curve: what is done with results and samples."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import click

from lakh.cli.eval_options import TEXTS_OPTION, common, make_sandbox, sampling_options, split_names
from lakh.cli.eval_show import bar
from lakh.cli.output import CommandResult, console, print_result, table
from lakh.errors import LakhError, UserError
from lakh.evals.protocol import Origin
from lakh.evals.run import Result
from lakh.evals.tasks import load_task

__all__ = ["curve", "diff", "export", "reproduce", "watch"]

CURVE_CHARS = 30


@click.command()
@click.argument("left")
@click.argument("right")
@print_result
def diff(left: str, right: str) -> CommandResult:
    """Compare two results, with a test of whether the difference is luck."""
    from rich.console import Group
    from rich.text import Text

    from lakh.evals.compare import compare, read_result

    found = compare(read_result(left), read_result(right))
    rows = [
        ("left, pass@1", found.left),
        ("right, pass@1", found.right),
        ("right - left", f"{found.difference:+.4f}  (95 %: {found.interval[0]:+.4f} to {found.interval[1]:+.4f})"),
        ("p-value", f"{found.p_value:.4g}  ({found.test})"),
        ("problems", found.problems),
        ("gained", f"{len(found.gained)}: {', '.join(found.gained[:8])}"),
        ("lost", f"{len(found.lost)}: {', '.join(found.lost[:8])}"),
    ]
    blocks = [table(["", "value"], rows, title=found.task)]
    if found.settings:
        blocks.append(table(["setting", left, right], found.settings, title="made differently"))
    return CommandResult(asdict(found), Group(*blocks, Text(found.verdict)))


@click.command()
@click.argument("result")
@click.option("--samples", metavar="FILE", help="The samples file, where it has moved.")
@common
@print_result
def reproduce(
    result: str, samples: str | None, data: str | None, limit: int | None, out: str | None, workers: int | None,
    rung: str | None, unsafe: bool,
) -> CommandResult:  # fmt: skip
    """Make a result again from its protocol, and say what differs.

    RESULT is the folder of a result, or a file with its protocol line.
    """
    from lakh.evals.generate import generate, load_engine
    from lakh.evals.reproduce import differences, read_request
    from lakh.evals.run import score

    if limit is not None:
        raise UserError("--limit", "a result is reproduced whole", "leave --limit out")
    request = read_request(result, data, samples=samples)
    given = request.samples
    with make_sandbox(unsafe, rung) as sandbox:
        if given is None:
            origin = request.origin
            engine = load_engine(origin.source, chat=origin.form == "chat", served_name=origin.served_name)
            with bar("generating", request.n * len(request.task.problems)) as progress:
                given = generate(engine, request.task, request.origin, n=request.n, progress=progress)
        with bar("running", len(given)) as progress:
            again: Result = score(
                request.task, given, sandbox, request.origin, cpu_s=request.cpu_s, workers=workers,
                progress=progress, calibration=request.settings.get("calibration", "given"), out=out,
            )  # fmt: skip
    changed = differences(request, list(again.verdicts))
    parts = again.protocol.parts()
    settings = {k: [v, parts.get(k)] for k, v in request.settings.items() if v != parts.get(k)}
    same = not changed and "samples_sha256" not in settings
    data_ = {"identical": same, "changed": changed, "settings_that_differ": settings, "result": again.as_dict()}
    words = "identical" if same else f"{len(changed)} of {len(given)} verdicts differ"
    if "samples_sha256" in settings:
        words = "the model wrote other completions than the first time"
    lines = [f"{words}: {again.summary.passed} of {again.summary.total} passed"]
    lines += [f"  {key}: {before!r} -> {now!r}" for key, (before, now) in settings.items()]
    return CommandResult(data_, "\n".join(lines), exit_code=0 if same else 65)


@click.command()
@click.argument("samples")
@click.option("--task", "name", required=True, help="Name of the benchmark.")
@click.option("--data", metavar="PATH", help="The benchmark's file, or the folder it lies in.")
@click.option("--out", required=True, metavar="FILE", help="JSON lines of {task_id, solution}, as EvalPlus reads them.")
@click.option("--partial", is_flag=True, help="Allow problems without a sample.")
@print_result
def export(samples: str, name: str, data: str | None, out: str, partial: bool) -> CommandResult:
    """Write samples as whole programs, in the form of EvalPlus."""
    from lakh.evals.samples import Sample, read_samples, whole_program, write_samples

    task = load_task(name, data)
    problems = {problem.id: problem for problem in task.problems}
    given = read_samples(samples, task, partial=partial)
    whole = [Sample(s.task_id, whole_program(task, problems[s.task_id], s), whole=True) for s in given]
    write_samples(out, whole)
    return CommandResult({"samples": len(whole), "file": out}, f"{len(whole)} samples -> {out}")


@click.command()
@click.argument("run_dir")
@sampling_options
@click.option("--every", default=1, show_default=True, type=click.IntRange(min=1), help="Steps divisible by this only.")
@click.option("--once", is_flag=True, help="Score what is there and leave; default: wait for more until Ctrl-C.")
@click.option("--poll", default=5.0, show_default=True, type=click.FloatRange(min=0.1), help="Seconds between looks.")
@TEXTS_OPTION
@common
@print_result
def watch(
    run_dir: str, tasks: str, n: int, temperature: float, top_p: float, seed: int, max_tokens: int, every: int,
    once: bool, poll: float, texts: str | None, data: str | None, limit: int | None, out: str | None,
    workers: int | None, rung: str | None, unsafe: bool,
) -> CommandResult:  # fmt: skip
    """Score the checkpoints of a run as they appear, beside its training."""
    from lakh.evals.generate import check_request
    from lakh.evals.perplexity import NAME as BITS_PER_BYTE
    from lakh.evals.tasks.lines import source_texts
    from lakh.evals.watch import watch as follow

    if out is not None:
        raise UserError("--out", "results of a run are kept in the run, under evals/", "leave --out out")
    names = split_names(tasks)
    read = source_texts(texts or data, BITS_PER_BYTE)[:limit] if BITS_PER_BYTE in names else []
    loaded = [load_task(name, data).first(limit) for name in names if name != BITS_PER_BYTE]
    origin = Origin(run_dir, temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    for task in loaded:
        check_request(task, origin, n)
    columns = ["step", "task", "passed", "total", "pass_at_k", "bits_per_byte", "interval"]
    rows: list[dict[str, Any]] = []

    def tell(step: int, found: dict[str, Any]) -> None:
        rows.append({"step": step} | {key: found.get(key) for key in columns[1:]})
        said = f"{found['passed']} of {found['total']} passed" if "passed" in found else f"{found['bits_per_byte']:.4f}"
        console().print(f"step {step}: {found['task']} {said}")

    def passed_over(path: str, error: LakhError) -> None:
        console().print(f"warning: passed over {path}: {error}", style="yellow")

    with make_sandbox(unsafe, rung) if loaded else nullcontext() as sandbox:  # bits per byte runs no programs
        follow(
            run_dir, loaded, sandbox, origin, n=n, every=every, poll_s=poll, until=lambda: once, texts=read,
            told=tell, passed_over=passed_over, workers=workers,
        )  # fmt: skip
    shown = ["step", "task", "passed", "total", "bits_per_byte"]
    text = table(shown, [[row[key] for key in shown] for row in rows]) if rows else "nothing new to score"
    return CommandResult({"results": rows}, text)


@click.command()
@click.argument("run_dir")
@click.option("--task", metavar="NAME", help="This task only.")
@print_result
def curve(run_dir: str, task: str | None) -> CommandResult:
    """Show how the checkpoints of a run scored, step by step."""
    from rich.console import Group

    from lakh.evals.watch import bits_per_byte
    from lakh.evals.watch import curve as read_curve

    found = read_curve(run_dir, task)
    bits = [] if task else [{"step": event.step, **event.values} for event in bits_per_byte(run_dir)]
    data = {"points": [asdict(event) for event in found], "bits_per_byte": bits}
    if not found and not bits:
        return CommandResult(data, "nothing is scored yet: lakh eval watch RUN_DIR --tasks humaneval")
    best = max((event.pass_at_1 or 0.0 for event in found), default=0.0) or 1.0
    rows = []
    for event in found:
        share = event.pass_at_1 or 0.0
        interval = "" if event.low is None or event.high is None else f"{event.low:.3f} - {event.high:.3f}"
        drawn = "█" * round(CURVE_CHARS * share / best)
        rows.append([event.task, event.step, f"{share:.4f}", interval, f"{event.passed} of {event.total}", drawn])
    blocks = [table(["task", "step", "pass@1", "95 %", "passed", ""], rows)] if rows else []
    if bits:
        most = max(row["bits_per_byte"] for row in bits)
        bars = [
            [row["step"], f"{row['bits_per_byte']:.4f}", f"{row['low']:.3f} - {row['high']:.3f}",
             "█" * round(CURVE_CHARS * row["bits_per_byte"] / most)]
            for row in bits
        ]  # fmt: skip
        blocks.append(table(["step", "bits per byte", "95 %", ""], bars))
    return CommandResult(data, Group(*blocks))
