"""Verdicts that others published are read in their own forms and compared with lakh's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.eval.published import compare_published, read_published, run_once_each

from lakh.errors import UserError
from lakh.evals.sandbox import CommandProgram, Sandbox, SandboxVerdict
from lakh.evals.task import Problem, Program, Task

TEST = "assert add(1) == 2\n"
RIGHT, WRONG = "def add(x):\n    return x + 1\n", "def add(x):\n    return x\n"
TASK = Task(
    name="toy",
    problems=(Problem("a", "def add(x):\n", "", TEST, "add"),),
    stops=(),
    data_sha256="0" * 64,
    build=lambda problem, completion: Program(problem.prompt + completion, TEST, names=("add",)),
)
FORMS: dict[str, Any] = {
    "bigcodebench": {
        "date": "2024-09-24",
        "eval": {
            "a": [{"solution": RIGHT, "status": "pass"}, {"solution": WRONG, "status": "fail"}],
            "elsewhere": [{"solution": "", "status": "pass"}],
        },
    },
    "livecodebench": [{"question_id": "a", "code_list": [RIGHT, WRONG], "graded_list": [True, False]}],
    "multipl-e": {
        "a": [[0, {"code": RIGHT + TEST, "passed": True}], [1, {"code": WRONG + TEST + "?>", "passed": False}]],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_programs_without_their_tests(form: str, tmp_path: Path) -> None:
    (tmp_path / "verdicts.json").write_text(json.dumps(FORMS[form]))
    found = read_published(str(tmp_path / "verdicts.json"), TASK)
    assert [(one.sample.completion, one.sample.whole, one.passed) for one in found] == [
        (RIGHT, True, True),
        (WRONG, True, False),
    ]


@pytest.mark.parametrize("document", [{"a": "x"}, [{"question_id": "a"}], {"eval": {}}, [], 3])
def test_another_file_is_refused(document: object, tmp_path: Path) -> None:
    (tmp_path / "verdicts.json").write_text(json.dumps(document))
    with pytest.raises(UserError):
        read_published(str(tmp_path / "verdicts.json"), TASK)


class FakeSandbox:
    """Passes programs that return x + 1."""

    def run(self, program: Program, limits: object) -> SandboxVerdict:
        return SandboxVerdict("passed" if "x + 1" in program.source else "failed")

    def map(self, work: Any, items: Any, *_: object, **__: object) -> list[Any]:
        return [work(item) for item in items]


def test_differences_are_counted_and_named(tmp_path: Path) -> None:
    rows = [{"question_id": "a", "code_list": [RIGHT, WRONG, RIGHT, WRONG], "graded_list": [True, False, False, True]}]
    (tmp_path / "verdicts.json").write_text(json.dumps(rows))
    lines: list[str] = []
    sandbox: Sandbox = FakeSandbox()  # type: ignore[assignment]
    row = compare_published(
        str(tmp_path / "verdicts.json"), TASK, sandbox, limit=None, workers=1, progress=lines.append
    )
    assert [row[key] for key in ("run", "passed by both", "only published", "only lakh")] == [4, 1, 1, 1]
    assert lines == ["a: published failed, lakh passed ()", "a: published passed, lakh failed ()"]


def test_only_programs_that_passed_there_can_be_run(tmp_path: Path) -> None:
    rows = [{"question_id": "a", "code_list": [WRONG, RIGHT, RIGHT, WRONG], "graded_list": [False, True, False, True]}]
    (tmp_path / "verdicts.json").write_text(json.dumps(rows))
    path, sandbox = str(tmp_path / "verdicts.json"), FakeSandbox()
    for limit, counts in ((None, [2, 1, 1]), (1, [1, 1, 0])):
        row = compare_published(path, TASK, sandbox, limit=limit, workers=1, progress=str, passing=True)  # type: ignore[arg-type]
        assert [row[key] for key in ("run", "passed by both", "only published")] == counts


def test_programs_can_run_once_each() -> None:
    checked = CommandProgram({"x": "test"}, (("true",),), controls=({"x": "changed"},), parts=({"x": "part"},))
    given: list[Program | CommandProgram] = [checked, Program("", "")]
    task = run_once_each(replace(TASK, build=lambda problem, completion: given[int(completion)]))
    assert task.build(task.problems[0], "0") == replace(checked, controls=())
    assert task.build(task.problems[0], "1") == given[1]
