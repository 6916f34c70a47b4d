"""Mutants of reference solutions, whose verdicts are compared with EvalPlus's."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from bench.eval import agreement
from bench.eval.mutants import mutants_of

from lakh.errors import UserError
from lakh.evals.data import BenchmarkFile
from lakh.evals.generation.samples import Sample
from lakh.evals.sandbox import Sandbox
from lakh.evals.task import Problem, Task
from lakh.evals.tasks import load_task

PROBLEMS = [
    Problem("X/0", "def largest(x):\n", "    return max(n + 1 for n in x if n > 0)\n", "", "largest"),
    Problem("X/1", "def text(x):\n", "    return str(x)\n", "", "text"),
]


def test_mutants_are_other_programs_and_the_same_for_a_seed() -> None:
    samples = mutants_of(PROBLEMS, 40, seed=1)
    assert samples == mutants_of(PROBLEMS, 40, seed=1)
    assert samples != mutants_of(PROBLEMS, 40, seed=2)
    originals = {ast.unparse(ast.parse(problem.prompt + problem.canonical)) for problem in PROBLEMS}
    for sample in samples:
        assert sample.whole
        assert ast.unparse(ast.parse(sample.completion)) not in originals
    assert len({sample.completion for sample in samples}) > 15
    assert any("n >= 0" in sample.completion for sample in mutants_of(PROBLEMS, 200, seed=0))


ROWS = [
    {
        "task_id": f"HumanEval/{number}", "prompt": "def half(x):\n", "canonical_solution": solution,
        "entry_point": "half", "base_input": [[2]], "plus_input": [[1]], "atol": 0,
    }
    for number, solution in enumerate(["    return x / 2\n", "    raise ValueError\n"])
]  # fmt: skip


def test_references_are_counted_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "HumanEvalPlus.jsonl.gz").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(BenchmarkFile, "_checked", lambda self, where, raw: raw)
    given: list[str] = []
    unsafe = Sandbox.choose(unsafe=True)
    monkeypatch.setattr(agreement.Sandbox, "choose", lambda **_: unsafe)

    def evalplus(task: Task, samples: Sequence[Sample], data: str | None) -> list[bool]:
        given.extend(sample.completion for sample in samples)
        return [True] * len(samples)

    monkeypatch.setattr(agreement, "_evalplus", evalplus)
    lines: list[str] = []
    row = agreement.compare_references(
        "humaneval-plus", data=str(tmp_path), workers=1, limit=None, progress=lines.append
    )
    assert given == [str(row["prompt"]) + str(row["canonical_solution"]) for row in ROWS]
    assert row == {
        "task": "humaneval-plus", "references": 2, "lakh_passed": 1, "evalplus_passed": 2, "disagreements": 1,
    }  # fmt: skip
    assert any(line.startswith("HumanEval/1: lakh failed") for line in lines)


def test_without_evalplus_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "HumanEvalPlus.jsonl.gz").write_text(json.dumps(ROWS[0]) + "\n")
    monkeypatch.setattr(BenchmarkFile, "_checked", lambda self, where, raw: raw)
    monkeypatch.setitem(sys.modules, "evalplus.eval", None)
    task = load_task("humaneval-plus", str(tmp_path))
    with pytest.raises(UserError, match=r"needs the package evalplus.*pip install"):
        agreement._evalplus(task, [], str(tmp_path))
