"""lakh's verdicts beside those that others published for the same programs.

A file of published verdicts has one of these forms:

    BigCodeBench    {"eval": {task: [{"solution": whole program, "status": "pass"}]}}: its own eval_results.json
    LiveCodeBench   [{"question_id": ..., "code_list": [programs], "graded_list": [true]}]: its own eval_all.json
    MultiPL-E       {task: [[number, {"code": prompt, completion and test, "passed": true}]]}: the details that the
                    evaluations of DeepSeek-Coder and Qwen2.5-Coder write

With an output folder each of lakh's verdicts is written there as it comes, to NAME-HASH.verdicts.jsonl, where the hash
is that of the programs. The same command continues after an interruption, also with another --limit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness import BenchRow
from lakh import storage
from lakh.errors import UserError
from lakh.evals.generation.samples import Sample, fingerprint
from lakh.evals.journal import Journal
from lakh.evals.run import run_samples
from lakh.evals.sandbox import CommandProgram, Program, Sandbox, SandboxVerdict
from lakh.evals.task import Problem, Task

__all__ = ["PublishedVerdict", "compare_published", "read_published", "run_once_each"]

CPU_S = 20
LOG_EVERY = 10


@dataclass(frozen=True, slots=True)
class PublishedVerdict:
    sample: Sample
    passed: bool


def read_published(path: str, task: Task) -> list[PublishedVerdict]:
    """The programs of a file and their verdicts, in its order. Problems that the task lacks are left out."""
    problems = {problem.id: problem for problem in task.problems}
    try:
        document = json.loads(Path(path).read_bytes())
        found = list(_verdicts(document, problems))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        todo = "give an eval_results.json of BigCodeBench, an eval_all.json of LiveCodeBench, or details of MultiPL-E"
        raise UserError(path, f"has no verdicts that can be read ({type(error).__name__}: {error})", todo) from None
    if not found:
        raise UserError(path, f"has no program for task {task.name}", "give the verdicts of this task's data")
    return found


def _verdicts(document: Any, problems: dict[str, Problem]) -> Iterator[PublishedVerdict]:
    if isinstance(document, list):
        for row in document:
            for program, passed in zip(row["code_list"], row["graded_list"], strict=True):
                if row["question_id"] in problems:
                    yield PublishedVerdict(Sample(row["question_id"], program, whole=True), bool(passed))
    elif "eval" in document:
        for name, rows in document["eval"].items():
            for row in rows:
                if name in problems:
                    yield PublishedVerdict(Sample(name, row["solution"], whole=True), row["status"] == "pass")
    else:
        for name, rows in document.items():
            for _, row in rows:
                if name in problems:
                    before, found, _ = row["code"].rpartition(problems[name].test)  # PHP has an end tag after it
                    program = before if found else row["code"]
                    yield PublishedVerdict(Sample(name, program, whole=True), bool(row["passed"]))


def run_once_each(task: Task) -> Task:
    """The task without the further runs that a program which passes has, to detect cheating. They take most of the
    time where a compiler is slow.
    """

    def build(problem: Problem, completion: str) -> Program | CommandProgram | SandboxVerdict:
        program = task.build(problem, completion)
        return replace(program, controls=()) if isinstance(program, CommandProgram) else program

    return replace(task, build=build)


def compare_published(
    path: str, task: Task, sandbox: Sandbox, *, limit: int | None, workers: int, progress: Callable[[str], object],
    passing: bool = False, once: bool = False, out: str | None = None,
) -> BenchRow:  # fmt: skip
    """Run the programs, or those that passed there, and count where the verdicts differ; logs each difference.

    `once` runs each one time, without the checks for cheating.
    """
    task = run_once_each(task) if once else task
    chosen = [one for one in read_published(path, task) if one.passed or not passing]
    given = chosen[:limit]
    limits = dict.fromkeys((problem.id for problem in task.problems), CPU_S)
    journal = None
    if out:  # rows have the number of a program among all that are chosen, whatever the limit is
        programs = fingerprint(one.sample for one in chosen)
        key = {"programs": programs, "task": task.name, "data": task.data_sha256, "sandbox": sandbox.description}
        file = storage.join(out, f"{Path(path).stem}-{programs[:8]}.verdicts.jsonl")
        journal = Journal(file, key | {"cpu_s": CPU_S, "once": once})

    def log_count(done: int) -> None:
        if done % LOG_EVERY == 0:
            progress(f"{Path(path).name}: {done} programs run")

    try:
        samples = [one.sample for one in given]
        ours = run_samples(task, samples, sandbox, cpu_s=limits, workers=workers, progress=log_count, journal=journal)
    finally:
        if journal is not None:
            journal.close()
    counts: Counter[str] = Counter()
    for one, verdict in zip(given, ours, strict=True):
        if verdict.kind == "not_run":
            counts["not run"] += 1
            continue
        counts["run"] += 1
        counts["passed by both"] += one.passed and verdict.passed
        if one.passed != verdict.passed:
            counts["only published" if one.passed else "only lakh"] += 1
            theirs = "passed" if one.passed else "failed"
            progress(f"{one.sample.task_id}: published {theirs}, lakh {verdict.kind} ({verdict.detail})")
    names = ("run", "not run", "passed by both", "only published", "only lakh")
    return {"task": task.name, "verdicts": Path(path).name, **{name: counts[name] for name in names}}
