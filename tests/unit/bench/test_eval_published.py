"""Verdicts that others published are read in their own forms and compared with lakh's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.eval.published import compare_published, read_published, run_once_each

from lakh.errors import Interrupted, UserError
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
    """Passes programs that return x + 1, and can be interrupted before one of its programs."""

    description = "none"

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.left, self.ran = interrupted_at, 0

    def run(self, program: Program, limits: object) -> SandboxVerdict:
        if self.ran == self.left:
            raise Interrupted("sandbox", "stopped", "run the same command again")
        self.ran += 1
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


def test_verdicts_are_kept_as_they_come_and_an_interrupted_command_continues(tmp_path: Path) -> None:
    rows = [{"question_id": "a", "code_list": [RIGHT, WRONG, RIGHT, WRONG], "graded_list": [True, False, False, True]}]
    (tmp_path / "verdicts.json").write_text(json.dumps(rows))

    def compare(sandbox: FakeSandbox, limit: int | None, once: bool = False) -> list[int]:
        path, out = str(tmp_path / "verdicts.json"), str(tmp_path / "out")
        row = compare_published(path, TASK, sandbox, limit=limit, workers=1, progress=str, once=once, out=out)  # type: ignore[arg-type]
        return [row[key] for key in ("run", "passed by both", "only published", "only lakh")]

    with pytest.raises(Interrupted):
        compare(FakeSandbox(interrupted_at=3), None)
    (file,) = (tmp_path / "out").glob("verdicts-*.verdicts.jsonl")
    assert [json.loads(line)["verdict"]["kind"] for line in file.read_text().splitlines()[1:]] == [
        "passed", "failed", "passed",
    ]  # fmt: skip
    for limit, ran, counts in ((2, 0, [2, 1, 0, 0]), (None, 1, [4, 1, 1, 1]), (None, 0, [4, 1, 1, 1])):
        sandbox = FakeSandbox()
        assert (compare(sandbox, limit), sandbox.ran) == (counts, ran)
    sandbox = FakeSandbox()
    assert (compare(sandbox, 1, once=True), sandbox.ran) == ([1, 1, 0, 0], 1)  # other runs of a program


def test_programs_can_run_once_each() -> None:
    checked = CommandProgram({"x": "test"}, (("true",),), controls=({"x": "changed"},), parts=({"x": "part"},))
    given: list[Program | CommandProgram] = [checked, Program("", "")]
    task = run_once_each(replace(TASK, build=lambda problem, completion: given[int(completion)]))
    assert task.build(task.problems[0], "0") == replace(checked, controls=())
    assert task.build(task.problems[0], "1") == given[1]
