"""A task of the user's own in a TOML or JSON file: it is judged as described, and each mistake says where it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakh.cli.main import cli
from lakh.errors import LakhError
from lakh.evals.generation.samples import Sample, canonical_samples
from lakh.evals.run import run_samples
from lakh.evals.sandbox import Sandbox
from lakh.evals.task import Program
from lakh.evals.tasks import load_task

TASK = """
name = "words"
data = "problems.jsonl"
stops = ["\\nEND"]

[fields]
id = "key"
prompt = "question"
test = "checks"
solution = "answer"
"""
ROW: dict[str, Any] = {
    "key": "double",
    "question": 'def double(x):\n    """Twice x."""\n',
    "checks": ["import math", "for x in (1, 21): assert double(x) == 2 * x", "assert math.isnan(double(math.nan))"],
    "answer": "    return 2 * x\n",
}
WRONG = "    return x\n"


def write(folder: Path, task: str = TASK, *rows: dict[str, Any], name: str = "words.toml") -> str:
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or (ROW,)))
    (folder / name).write_text(task)
    return str(folder / name)


def kinds(sandbox: Sandbox, path: str, *completions: str) -> list[str]:
    task = load_task(path)
    samples = [*canonical_samples(task), *(Sample(task.problems[0].id, text) for text in completions)]
    return [verdict.kind for verdict in run_samples(task, samples, sandbox)]


def test_the_solution_passes_and_a_wrong_program_fails(sandbox: Sandbox, tmp_path: Path) -> None:
    path = write(tmp_path)
    assert kinds(sandbox, path, WRONG) == ["passed", "failed"]
    task = load_task(path)
    assert (task.name, task.stops, task.problems[0].id) == ("words", ("\nEND",), "double")
    program = task.build(task.problems[0], WRONG)
    assert isinstance(program, Program)
    assert program.names == ("double",)  # not math, not range: what the test neither defines nor imports


def test_json_and_a_test_in_humanevals_form(sandbox: Sandbox, tmp_path: Path) -> None:
    described = {
        "name": "own",
        "data": "problems.jsonl",
        "fields": {"prompt": "question", "test": "check", "solution": "answer", "entry_point": "key"},
    }
    row = {**ROW, "check": "def check(f):\n    assert f(21) == 42\n"}
    path = write(tmp_path, json.dumps(described), row, name="own.json")
    assert kinds(sandbox, path, WRONG) == ["passed", "failed"]
    assert load_task(path).problems[0].id == "own/0"


def test_whole_programs_come_from_the_last_block_of_an_answer(sandbox: Sandbox, tmp_path: Path) -> None:
    row = {**ROW, "question": "Write double(x), please.", "answer": "def double(x):\n    return 2 * x\n"}
    path = write(tmp_path, 'completion = "program"\n' + TASK, row)
    assert kinds(sandbox, path, "def double(x):\n    return x\n") == ["passed", "failed"]
    assert load_task(path).extract("Sure:\n```python\ndef double(x): pass\n```\n").strip() == "def double(x): pass"


def test_another_language_runs_as_in_multipl_e(sandbox: Sandbox, tmp_path: Path) -> None:
    row = {
        "question": "double() {\n", "answer": "    echo $((2 * $1))\n}\n",
        "checks": '[ "$(double 21)" = 42 ] || exit 1\n',
    }  # fmt: skip
    task = 'language = "sh"\n' + TASK.replace('id = "key"\n', "")
    assert kinds(sandbox, write(tmp_path, task, row), "    echo $1\n}\n") == ["passed", "failed"]


def test_exact_match_runs_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, 'metric = "exact-match"\n' + TASK, {**ROW, "checks": None})
    task = load_task(path)
    built = [task.build(task.problems[0], text) for text in (" return 2 * x ", "return x")]
    assert [verdict.kind for verdict in built] == ["passed", "failed"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("task", "row", "found"),
    [
        (TASK.replace('"words"', '"two words"'), ROW, "name (words.toml): is 'two words'"),
        (TASK.replace('"words"', '"humaneval"'), ROW, "has the name of lakh's own task humaneval"),
        (TASK.replace("stops", "stop"), ROW, "stop"),
        ('language = "cobol"\n' + TASK, ROW, "language (words.toml): 'cobol' is not supported"),
        (
            'metric = "exact-match"\n' + TASK.replace('solution = "answer"', ""),
            ROW,
            "fields.solution (words.toml): is empty",
        ),
        (TASK.replace('data = "problems.jsonl"', ""), ROW, "names no data"),
        (TASK.replace('"question"', '"ask"'), ROW, "row 1: has no ask"),
        (TASK, {**ROW, "question": 3}, "row 1: question is a int, not a text"),
        (TASK, {**ROW, "checks": "assert (double(1)"}, "row 1: checks is not Python"),
        (TASK, {**ROW, "checks": "# later"}, "every program would pass"),
        (TASK, {**ROW, "checks": "assert 1 + 1 == 2"}, "takes nothing from the program"),
        (TASK, {**ROW, "checks": "def check(f):\n    assert f(1) == 2"}, "defines check and does not call it"),
        ('language = "go"\n' + TASK, {**ROW, "checks": "assert"}, "does not end as tests of go do"),
        ("name = ", ROW, "is not TOML"),
    ],
)
def test_a_mistake_says_where_it_is(tmp_path: Path, task: str, row: dict[str, Any], found: str) -> None:
    path = write(tmp_path, task, row)
    with pytest.raises(LakhError) as error:
        load_task(path)
    assert found in str(error.value)


def test_ids_have_to_differ(tmp_path: Path) -> None:
    path = write(tmp_path, TASK, ROW, ROW)
    with pytest.raises(LakhError, match="row 2: has the id 'double' again"):
        load_task(path)


def test_the_commands_score_and_reproduce_it(sandbox: Sandbox, tmp_path: Path) -> None:
    path = write(tmp_path)
    given = tmp_path / "samples.jsonl"
    given.write_text(json.dumps({"task_id": "double", "completion": WRONG}) + "\n")
    shared = ["--workers", "1", "--json"]
    out = str(tmp_path / "result")
    scored = CliRunner().invoke(
        cli, ["eval", "score", str(given), "--task", path, "--out", out, "--cpu-limit", "10", *shared]
    )
    assert scored.exit_code == 0, scored.output
    again = CliRunner().invoke(cli, ["eval", "reproduce", out, "--task", path, *shared])
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["identical"]
