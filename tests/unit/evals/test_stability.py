"""Verdicts are the same on an idle machine and next to processes that keep every CPU busy."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from bench.eval.stability import FAILING, busy_machine, failing_samples, repeat

from lakh.evals.run import run_samples
from lakh.evals.sandbox import Sandbox
from lakh.evals.sandbox.verdict import SandboxVerdict
from lakh.evals.task import CommandProgram, Problem, Program, Task
from lakh.evals.tasks import load_task


@pytest.mark.slow
def test_verdicts_do_not_change_under_load(sandbox: Sandbox) -> None:
    found = repeat(load_task("humaneval").first(20), sandbox, loaded_passes=1, busy=2 * (os.cpu_count() or 1))
    assert found.solutions_passed == (20, 20)
    assert found.samples == 20 + len(FAILING)
    assert found.changed == 0


@pytest.mark.slow
def test_each_failing_sample_gets_its_verdict(sandbox: Sandbox, toy_task: Task) -> None:
    one = replace(toy_task, problems=toy_task.problems[:1])
    samples = failing_samples(one)
    limits = {"Toy/0": 1}
    kinds = [verdict.kind for verdict in run_samples(one, samples, sandbox, cpu_s=limits)]
    assert dict(zip(FAILING, kinds, strict=True)) == {
        "wrong": "failed",
        "exception": "failed",
        "memory": "memory",
        "endless loop": "timeout",
    }


@pytest.mark.slow
def test_a_changed_verdict_is_counted(sandbox: Sandbox, toy_task: Task) -> None:
    first = toy_task.problems[0]
    built: list[str] = []

    def moody(problem: Problem, completion: str) -> Program | CommandProgram | SandboxVerdict:
        program = toy_task.build(problem, completion)
        built.extend([completion] if problem == first and completion == first.canonical else [])
        wrong = (
            problem == first and completion == first.canonical and len(built) == 2
        )  # once for the failing samples, then in the first pass
        return Program("", "assert False") if wrong else program

    found = repeat(replace(toy_task, build=moody), sandbox, loaded_passes=1, busy=0, workers=1)
    assert found.solutions_passed == (2, 3)
    assert found.changed == 1
    assert not found.is_identical


def test_busy_processes_end_with_the_block() -> None:
    with busy_machine(2) as pids:
        assert len(pids) == 2
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
