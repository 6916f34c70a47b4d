"""Verdicts of HumanEval+ and MBPP+ beside EvalPlus's own, on reference solutions and on mutants of these (mutants.py).

EvalPlus's checking function gets the inputs and the outputs of the reference, as its command does. It limits wall time
and lakh limits CPU time, so a program without end is "not passed" in both.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from bench.eval.mutants import mutants_of
from bench.harness import BenchRow
from lakh.errors import UserError
from lakh.evals.data import read_rows
from lakh.evals.generation.samples import Sample, canonical_samples
from lakh.evals.run import run_samples
from lakh.evals.sandbox import Sandbox
from lakh.evals.task import Task
from lakh.evals.tasks import load_task

__all__ = ["compare_references", "compare_verdicts"]

EVALPLUS = "install it: pip install 'lakh[bench]' && pip install --no-deps evalplus"
CPU_S = 10
REFERENCE_CPU_S = 280  # the slowest of MBPP+ sum 17 times over 100 million numbers


def compare_verdicts(
    name: str, *, count: int, seed: int, data: str | None, workers: int, progress: Callable[[str], object]
) -> tuple[BenchRow, list[dict[str, Any]]]:
    """A row of counts, and the samples on which the two disagree."""
    task = load_task(name, data)
    samples = mutants_of(task.problems, count, seed)
    limits = dict.fromkeys((problem.id for problem in task.problems), CPU_S)
    with Sandbox.choose(workers=workers) as sandbox:
        ours = run_samples(task, samples, sandbox, cpu_s=limits, workers=workers)
    progress(f"{name}: lakh passes {sum(one.passed for one in ours)} of {count}")
    theirs = _evalplus(task, samples, data)
    different: list[dict[str, Any]] = [
        {"task_id": sample.task_id, "lakh": verdict.kind, "detail": verdict.detail, "evalplus": passed,
         "program": sample.completion}
        for sample, verdict, passed in zip(samples, ours, theirs, strict=True)
        if verdict.passed != passed
    ]  # fmt: skip
    references = {problem.id: problem.prompt + problem.canonical for problem in task.problems}
    for one in different:  # EvalPlus 0.3.1 passes no solution of HumanEval/32, not even its own
        reference = Sample(one["task_id"], references[one["task_id"]], whole=True)
        one["evalplus_passes_reference"] = _evalplus(task, [reference], data)[0]
    row: BenchRow = {
        "task": name,
        "mutants": count,
        "seed": seed,
        "lakh_passed": sum(one.passed for one in ours),
        "evalplus_passed": sum(theirs),
        "disagreements": len(different),
        "where_evalplus_fails_its_own_solution": sum(not one["evalplus_passes_reference"] for one in different),
    }
    return row, different


def compare_references(
    name: str, *, data: str | None, workers: int, limit: int | None, progress: Callable[[str], object]
) -> BenchRow:
    """How many reference solutions pass here and in EvalPlus; logs those that do not."""
    task = load_task(name, data)
    samples = canonical_samples(task)[:limit]
    cpu_s = dict.fromkeys((problem.id for problem in task.problems), REFERENCE_CPU_S)
    with Sandbox.choose(workers=workers) as sandbox:
        ours = run_samples(task, samples, sandbox, cpu_s=cpu_s, workers=workers)
    progress(f"{name}: lakh passes {sum(one.passed for one in ours)} of {len(samples)}")
    for sample, verdict in zip(samples, ours, strict=True):
        if not verdict.passed:
            progress(f"{sample.task_id}: lakh {verdict.kind} ({verdict.detail})")
    prompts = {problem.id: problem.prompt for problem in task.problems}
    whole = [Sample(one.task_id, prompts[one.task_id] + one.completion, whole=True) for one in samples]
    theirs = _evalplus(task, whole, data)
    for sample, passed in zip(samples, theirs, strict=True):
        if not passed:
            progress(f"{sample.task_id}: EvalPlus fails its own solution")
    return {
        "task": name,
        "references": len(samples),
        "lakh_passed": sum(one.passed for one in ours),
        "evalplus_passed": sum(theirs),
        "disagreements": sum(one.passed != passed for one, passed in zip(ours, theirs, strict=True)),
    }


def _evalplus(task: Task, samples: Sequence[Sample], data: str | None) -> list[bool]:
    try:
        from evalplus.eval import untrusted_check
    except ImportError:
        raise UserError("lakh bench eval --agreement", "needs the package evalplus", EVALPLUS) from None
    from lakh.evals.tasks.humaneval_plus import FILES, KEYS
    from lakh.evals.tasks.mbpp_plus import FILE, arguments_of

    file = FILES.get(task.name, FILE)
    rows = {row["task_id"]: row for row in read_rows(file.name, file.read(data), KEYS)}
    dataset = "humaneval" if task.name in FILES else "mbpp"
    expected: dict[str, list[tuple[list[Any], list[Any]]]] = {}
    verdicts = []
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        for sample in samples:
            row = rows[sample.task_id]
            if sample.task_id not in expected:
                lists: list[list[Any]] = [row["base_input"], row["plus_input"]]
                if dataset == "mbpp":
                    lists = [[arguments_of(row["task_id"], given) for given in one] for one in lists]
                expected[sample.task_id] = [(inputs, _outputs(row, inputs)) for inputs in lists if inputs]
            verdicts.append(
                all(
                    untrusted_check(
                        dataset, sample.completion, deepcopy(inputs), row["entry_point"], outputs, row["atol"],
                        [1.0] * len(inputs), fast_check=True,
                    )[0] == "pass"
                    for inputs, outputs in expected[sample.task_id]
                )
            )  # fmt: skip
    return verdicts


def _outputs(row: dict[str, Any], inputs: list[Any]) -> list[Any]:
    names: dict[str, Any] = {}
    exec(row["prompt"] + row["canonical_solution"], names)
    outputs = [names[row["entry_point"]](*deepcopy(given)) for given in inputs]
    if row["entry_point"] in ("check_str", "text_match_three", "text_starta_endb"):  # EvalPlus keeps truth only
        return [output is not None for output in outputs]
    return outputs
