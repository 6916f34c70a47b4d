"""Published forms of benchmarks: MBPP+, MultiPL-E, LiveCodeBench, BigCodeBench. Right programs pass, others fail."""

from __future__ import annotations

import ast
import base64
import json
import pickle
import random
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from bench.eval.attacks.suite import read_table

from lakh.errors import UserError
from lakh.evals.data import BenchmarkFile, read_rows
from lakh.evals.generation.samples import Sample, canonical_samples
from lakh.evals.run import run_samples
from lakh.evals.sandbox import CommandProgram, Sandbox, SandboxVerdict
from lakh.evals.task import Problem, Program
from lakh.evals.tasks import load_task, multilingual, multipl_e
from lakh.evals.tasks.control_tests import changed_tests, failing_unittests, parts_of_test, parts_of_unittest


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def kinds(task: Any, sandbox: Sandbox, *completions: str, whole: bool = False) -> list[str]:
    samples = [Sample(task.problems[0].id, text, whole=whole) for text in completions]
    return [verdict.kind for verdict in run_samples(task, samples, sandbox)]


# --- MBPP+ -------------------------------------------------------------------------------------------------------


def mbpp_row(number: int, name: str, solution: str, *inputs: list[Any], atol: float = 0) -> dict[str, Any]:
    return {
        "task_id": f"Mbpp/{number}", "prompt": f'"""\nWrite {name}.\n"""\n', "entry_point": name,
        "canonical_solution": solution, "base_input": inputs[:1], "plus_input": inputs[1:], "atol": atol,
    }  # fmt: skip


MBPP = {
    "arguments are tuples, the order is free": (
        mbpp_row(2, "similar_elements", "def similar_elements(a, b): return tuple(set(a) & set(b))\n",
                 [[3, 4, 5], [5, 4]], [[], []]),
        "def similar_elements(a, b):\n    assert type(a) is tuple\n    return [x for x in reversed(a) if x in b]\n",
        "def similar_elements(a, b):\n    return a\n",
    ),
    "a match counts as true": (
        mbpp_row(434, "text_match_three", "import re\ndef text_match_three(s): return re.search('ab{3}', s)\n",
                 ["abbb"], ["ab"]),
        "def text_match_three(s):\n    return 'abbb' in s\n",
        "import re\ndef text_match_three(s):\n    return re.search('b', s)\n",
    ),
    "complex arguments": (
        mbpp_row(252, "convert", "import cmath\ndef convert(z): return cmath.polar(z)\n", ["(1+2j)"], ["3j"]),
        "def convert(z):\n    import math\n    return (abs(z), math.atan2(z.imag, z.real))\n",
        "def convert(z):\n    return (abs(z), 0.0)\n",
    ),
    "sets, and an empty one": (
        mbpp_row(115, "empty_dit", "def empty_dit(rows): return all(not row for row in rows)\n",
                 [[[], [], []]], [[[1], []]]),
        "def empty_dit(rows):\n    return not any(rows)\n",
        "def empty_dit(rows):\n    return True\n",
    ),
    "floats within a tolerance": (
        mbpp_row(1, "third", "def third(x): return x / 3\n", [1], [2.5]),
        "def third(x):\n    return x * (1 / 3)\n",
        "def third(x):\n    return x * 0.3333\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MBPP)
def test_mbpp_plus(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(BenchmarkFile, "_checked", lambda self, where, raw: raw)
    row, right, wrong = MBPP[case]
    task = load_task("mbpp-plus", written(tmp_path / "plus.jsonl", row))
    assert kinds(task, sandbox, row["canonical_solution"], right, wrong) == ["passed", "passed", "failed"]


# --- LiveCodeBench -----------------------------------------------------------------------------------------------


def contest_row(cases: list[tuple[str, str]], *, packed: bool = False, **changes: Any) -> dict[str, Any]:
    private = json.dumps([{"input": a, "output": b, "testtype": "stdin"} for a, b in cases[1:]])
    if packed:
        private = base64.b64encode(zlib.compress(pickle.dumps(private))).decode()
    public = json.dumps([{"input": a, "output": b, "testtype": "stdin"} for a, b in cases[:1]])
    row = {
        "question_title": "t", "question_content": "Add.", "platform": "atcoder", "question_id": "abc1_a",
        "contest_id": "abc1", "contest_date": "2024-01-01T00:00:00", "starter_code": "", "difficulty": "easy",
        "public_test_cases": public, "private_test_cases": private, "metadata": "{}",
    }  # fmt: skip
    return row | changes


STDIN = [("1 2\n", "3\n"), ("10 20", "30")]


@pytest.mark.parametrize("packed", [False, True])
def test_livecodebench_programs_read_stdin(sandbox: Sandbox, tmp_path: Path, packed: bool) -> None:
    task = load_task("livecodebench", written(tmp_path / "x.jsonl", contest_row(STDIN, packed=packed)))
    right = [
        "a, b = map(int, input().split())\nprint(a + b)\n",
        "import sys\ndef main():\n    print(sum(map(int, sys.stdin.buffer.read().split())), end='  \\n')\n"
        "if __name__ == '__main__':\n    main()\n    sys.exit(0)\n",
        "print(float(sum(map(int, open(0).read().split()))))\n",
        "sys.stdout.write(str(reduce(operator.add, map(int, sys.stdin.readline().split()))))\n",
        "print(pow(sum(map(int, stdin.read().split())), 1, datetime.date(2024, 1, 1).year))\nexit()\n",
    ]
    wrong = [
        "a, b = map(int, input().split())\nprint(a - b)\n",
        "print(3)\n",
        "print(3)\nprint(30)\n",
        "raise SystemExit(0)\n",
        "import os\nos._exit(0)\n",
        "x = '''\n",
        "",
    ]
    assert kinds(task, sandbox, *right) == ["passed"] * len(right)
    assert kinds(task, sandbox, *wrong) == ["failed"] * len(wrong)
    assert kinds(task, sandbox, right[0], wrong[0], whole=True) == ["passed", "failed"]
    assert task.extract("Sure:\n```python\nprint(1)\n```\n") == "print(1)\n"


def test_livecodebench_methods_are_called(sandbox: Sandbox, tmp_path: Path) -> None:
    starter = "class Solution:\n    def shift(self, nums: List[int], by: int) -> List[int]:\n        "
    cases = [("[1, 2]\n3", "[4, 5]"), ("[]\n1", "[]")]
    row = contest_row(cases, metadata='{"func_name": "shift"}', starter_code=starter)
    task = load_task("livecodebench", written(tmp_path / "x.jsonl", row))
    right = "class Solution:\n    def shift(self, nums: List[int], by: int) -> List[int]:\n        return RESULT\n"
    answers = [right.replace("RESULT", text) for text in ("[n + by for n in nums]", "tuple(n + by for n in nums)")]
    function = "def shift(nums, by):\n    return [n + by for n in nums]\n"
    wrong = [right.replace("RESULT", text) for text in ("nums", "(n + by for n in nums)", "[4, 5]")]
    assert kinds(task, sandbox, *answers, function) == ["passed"] * 3
    assert kinds(task, sandbox, *wrong) == ["failed"] * 3
    assert "class Solution" in task.problems[0].prompt


def test_a_slow_case_is_ended(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakh.evals.tasks.livecodebench.CASE_CPU_S", 1)
    task = load_task("livecodebench", written(tmp_path / "x.jsonl", contest_row(STDIN)))
    (verdict,) = run_samples(task, [Sample("abc1_a", "while True: pass\n")], sandbox)
    assert (verdict.kind, verdict.detail[:30]) == ("failed", "TimeoutError: more than 1 s of")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"private_test_cases": "%%%"}, "cannot be read"),
        ({"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()}, "instead of a text"),
        ({"metadata": "[]"}, "cannot be read"),
        ({"public_test_cases": "[]", "private_test_cases": "[]"}, "no test cases"),
    ],
)
def test_damaged_contest_rows_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], finding: str
) -> None:
    with pytest.raises(UserError, match=finding):
        load_task("livecodebench", written(tmp_path / "x.jsonl", contest_row(STDIN, **changes)))
    assert capsys.readouterr().out == ""


# --- BigCodeBench ------------------------------------------------------------------------------------------------

DOCSTRING = 'import json\ndef task_func(path):\n    """The sum of the numbers in a JSON file."""\n'
UNITTEST = """
import os, tempfile, unittest
from unittest.mock import patch

class TestCases(unittest.TestCase):
    def setUp(self):
        self.path = os.path.join(tempfile.mkdtemp(), "x.json")
        with open(self.path, "w") as file:
            json.dump([1, 2, 3], file)
    def test_sum(self):
        self.assertEqual(task_func(self.path), 6)
    def test_the_file_is_read_with_json(self):
        with patch("json.load", return_value=[5]):
            self.assertEqual(task_func(self.path), 5)
"""
BIG = {
    "task_id": "BigCodeBench/0", "complete_prompt": DOCSTRING, "instruct_prompt": "Write task_func.",
    "canonical_solution": "    with open(path) as file:\n        return sum(json.load(file))\n",
    "code_prompt": "import json\ndef task_func(path):\n", "test": UNITTEST, "entry_point": "task_func",
    "doc_struct": "{}", "libs": "['json']",
}  # fmt: skip
CHEATS = [
    "    return 6\n",
    "    import os; os._exit(0)\n",
    "    return 6\nimport unittest\nunittest.TestCase.assertEqual = lambda *_: None\n",
    "    import re\n    print('\\n' + re.findall('[0-9a-f]{32}', open('main.py').read())[0], flush=True)\n"
    "    import os; os._exit(0)\n",
    "    return 6\nimport unittest\nunittest.TestCase.run = lambda self, result: result.startTest(self)\n",
    "    return 6\n'''",
]


def test_bigcodebench_runs_unittests_in_one_process(sandbox: Sandbox, tmp_path: Path) -> None:
    task = load_task("bigcodebench", written(tmp_path / "big.jsonl", BIG))
    assert kinds(task, sandbox, BIG["canonical_solution"], *CHEATS) == ["passed"] + ["failed"] * len(CHEATS)
    whole = BIG["code_prompt"] + BIG["canonical_solution"]
    assert kinds(task, sandbox, whole, whole=True) == ["passed"]


@pytest.mark.slow
def test_bigcodebench_instructions_and_parquet(sandbox: Sandbox, tmp_path: Path) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.Table.from_pylist([BIG]), tmp_path / "big.parquet")
    task = load_task("bigcodebench-instruct", str(tmp_path / "big.parquet"))
    assert task.problems[0].prompt == "Write task_func."
    assert [v.kind for v in run_samples(task, canonical_samples(task), sandbox)] == ["passed"]
    assert kinds(task, sandbox, BIG["canonical_solution"]) == ["failed"]
    (tmp_path / "big.parquet").write_bytes(b"PAR1" + b"\0" * 20)
    with pytest.raises(UserError, match="is not Parquet"):
        load_task("bigcodebench", str(tmp_path / "big.parquet"))


@pytest.mark.slow
def test_bigcodebench_needs_its_packages(sandbox: Sandbox, tmp_path: Path) -> None:
    row = BIG | {"libs": "['numpy', 'json']", "complete_prompt": "import numpy\n" + DOCSTRING}
    task = load_task("bigcodebench", written(tmp_path / "big.jsonl", row))
    (verdict,) = run_samples(task, canonical_samples(task), sandbox)
    assert (verdict.kind, verdict.detail) == ("not_run", "needs --packages numpy")
    with Sandbox.choose(backend="bubblewrap", package_names=("numpy",)) as with_numpy:
        assert kinds(task, with_numpy, BIG["canonical_solution"], "    return 6\n") == ["passed", "failed"]


def test_programs_of_bigcodebench_can_start_python(sandbox: Sandbox, tmp_path: Path) -> None:
    task = load_task("bigcodebench", written(tmp_path / "big.jsonl", BIG))
    program = task.build(task.problems[0], BIG["canonical_solution"])
    assert isinstance(program, CommandProgram)
    folder = Path(program.commands[0][0]).parent
    assert program.environment["PATH"].split(":") == [str(folder), "/usr/bin", "/bin"]
    started = (
        f"    import subprocess\n    subprocess.run(['{Path(program.commands[0][0]).name}', '-c', '0'], check=True)\n"
    )
    assert kinds(task, sandbox, started + BIG["canonical_solution"]) == ["passed"]


def test_bigcodebench_needs_the_packages_of_its_tests(sandbox: Sandbox, tmp_path: Path) -> None:
    test = "import numpy.linalg as linalg\nfrom not_installed.part import name\nfrom os import path\n" + BIG["test"]
    task = load_task("bigcodebench", written(tmp_path / "big.jsonl", BIG | {"test": test}))
    (verdict,) = run_samples(task, canonical_samples(task), sandbox)
    assert (verdict.kind, verdict.detail) == ("not_run", "needs --packages not-installed,numpy")


CHECKS = """
class TestCases(unittest.TestCase):
    def test_one(self):
        self.assertEqual(f(1), [1, {"a": -2.5}])
        self.assertEqual("ok", f(2))
    def test_two(self):
        self.assertTrue(f(3))
        self.assertEqual(f(4), expected)
        self.assertEqual(f(5), [])
"""


def test_changed_unittests_look_like_tests() -> None:
    changed = failing_unittests(CHECKS)
    assert len(changed) == len(set(changed)) == 3
    plain = ast.unparse(ast.parse(CHECKS)).split("\n")
    for text in changed:
        assert sum(a != b for a, b in zip(text.split("\n"), plain, strict=True)) == 1


def test_checks_that_a_run_may_not_reach_are_not_changed() -> None:
    lines = [
        "if warned:\n    self.assertEqual(f(1), 2)",
        "for one in f(0):\n    self.assertEqual(len(one), 0)",
        "with self.assertRaises(ValueError):\n    self.assertEqual(f(1), 2)",
        "try:\n    self.assertTrue(f(1))\nexcept ValueError:\n    self.assertTrue(f(1))",
        "try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    self.assertTrue(f(1))",
    ]
    assert failing_unittests("\n".join(lines)) == []
    (changed,) = failing_unittests("\n".join([*lines, "with opened() as file:\n    self.assertTrue(f(2))"]))
    assert changed.endswith("self.assertFalse(f(2))")
    assert len(failing_unittests("try:\n    self.assertTrue(f(1))\nfinally:\n    self.assertTrue(f(2))")) == 2


def test_a_changed_number_is_outside_the_tolerance_of_its_check() -> None:
    for delta in ("10", "0.5"):
        for text in failing_unittests(f"self.assertAlmostEqual(f(1), 600, delta={delta})"):
            assert int(text.split(", ")[1]) > 600 + float(delta)
    assert failing_unittests("self.assertAlmostEqual(f(1), 600, delta=limit)") == []


def test_a_unittest_without_expected_values_gets_a_failing_check() -> None:
    test = CHECKS.replace('[1, {"a": -2.5}]', "x").replace('"ok"', "x").replace("assertTrue", "check")
    changed = failing_unittests(test)
    assert len(changed) == 2
    assert all(text.count("assertEqual") == 5 for text in changed)
    assert failing_unittests("x = 1") == []


def test_parts_of_a_unittest_lack_its_last_methods() -> None:
    (part,) = parts_of_unittest(UNITTEST)
    assert "def setUp" in part
    assert re.findall(r"def (test_\w+)", part) == sorted(re.findall(r"def (test_\w+)", UNITTEST))[:1]
    assert parts_of_unittest("class TestCases(unittest.TestCase):\n    pass\n") == []


DEPENDENT = """
class TestCases(unittest.TestCase):
    answers = [3, 4, 5]
    def test_1(self):
        result = task_func(self.answers.pop(0))
        self.assertEqual(result, 3)
        self.assertEqual(len([result, 4]), 2)
    def test_2(self):
        self.assertEqual(task_func(self.answers.pop(0)), 4)
        self.assertTrue(self.found["x"])
        with self.assertRaises(IndexError):
            [].pop()
    def test_3(self):
        result = task_func(self.answers.pop(0))
        self.assertEqual(result, 5, msg=str(result))
"""


EXPECTED_FAILURE = """
class TestCases(unittest.TestCase):
    def test_values_differ(self):
        with self.assertRaises(AssertionError):
            np.testing.assert_array_equal(one, other)
        try:
            self.assertEqual(one, other)
        except AssertionError:
            pass
        self.assertEqual(one, one)
"""


def test_parts_of_a_unittest_keep_checks_that_it_expects_to_fail() -> None:
    """As BigCodeBench/451 does: without the check, its block raises nothing, and an honest program fails the part."""
    (part,) = parts_of_unittest(EXPECTED_FAILURE, random.Random(0))
    assert "assert_array_equal(one, other)" in part
    assert "self.assertEqual(one, other)" in part
    assert "self.assertEqual(one, one)" not in part


def test_methods_of_a_unittest_may_depend_on_those_before_them() -> None:
    parts = parts_of_unittest(DEPENDENT, random.Random(0))
    assert len(parts) == len(set(parts)) == 11  # three lengths, and all sets of the two checks that can be left out
    for part in parts:
        names = re.findall(r"def (test_\w+)", part)
        assert names == ["test_1", "test_2", "test_3"][: len(names)]
        assert part.count("pop(0)") == len(names)
        assert ("msg=str(result)" in part) == ("test_3" in names)
        assert all((text in part) == ("test_2" in names) for text in ("assertTrue", "assertRaises"))
        assert ast.unparse(ast.parse(part)) == part


def test_a_part_of_a_unittest_has_no_method_that_another_one_replaces() -> None:
    again = "    def test_sum(self):\n        self.assertEqual(task_func(self.path), 6)\n"
    other = "class Helper:\n    def test_nothing(self):\n        pass\n"
    parts = parts_of_unittest(UNITTEST + again + other)
    assert all(part.count("def test_sum") in (0, 2) for part in parts)
    assert all("def test_nothing" in part for part in parts)


# --- MultiPL-E ---------------------------------------------------------------------------------------------------

ADD = read_table("programs.toml")
SLOW = {"cpp", "java", "go_test.go", "rs", "r", "rb", "ts"}


def multipl_e_row(language: str) -> dict[str, Any]:
    prompt, tests = ADD[language]["prompt"], ADD[language]["tests"]
    return {
        "name": "HumanEval_0_add", "language": language, "prompt": prompt, "doctests": "transform", "original": "x.py",
        "prompt_terminology": "reworded", "tests": tests, "stop_tokens": ["\n\n\n"],
    }  # fmt: skip


@pytest.mark.parametrize(
    "language",
    [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in ADD],
)
def test_multipl_e_in_each_language(sandbox: Sandbox, tmp_path: Path, language: str) -> None:
    right = ADD[language]["completion"]
    task = load_task("multipl-e", written(tmp_path / "x.jsonl", multipl_e_row(language)))
    wrong = right.replace("a + b", "a - b").replace("$a + $b", "$a - $b").replace("$1 + $2", "$1 - $2")
    found = run_samples(task, [Sample("HumanEval_0_add", right), Sample("HumanEval_0_add", wrong)], sandbox)
    if found[0].kind == "not_run":
        assert "is not installed in /usr/bin:/bin" in found[0].detail or "runs in the sandbox from" in found[0].detail
        return
    assert [verdict.kind for verdict in found] == ["passed", "failed"], found


@pytest.mark.parametrize("language", ADD)
def test_checks_and_expected_values_of_each_language_are_recognised(language: str) -> None:
    tests = ADD[language]["tests"]
    arguments = [("1 2", "4 5"), ("1, 2", "4, 5"), ("(1), (2)", "(4), (5)"), ("(1l), (2l)", "(4l), (5l)"),
                 ("(1L), (2L)", "(4L), (5L)"), ('"1" "2"', '"4" "5"'), ("a: 1, b: 2", "a: 4, b: 5")]  # fmt: skip
    first, second = next(pair for pair in arguments if all(one in tests for one in pair))
    assert sorted((first in part, second in part) for part in parts_of_test(tests)) == [(False, True), (True, False)]
    changed = changed_tests(tests)
    assert len(changed) == 8
    for text in changed:
        assert first in text
        assert second in text
        assert text.count("0.001") == tests.count("0.001")


@pytest.mark.parametrize(
    ("check", "kept"),
    [
        ('assert_eq!(candidate(String::from("hi")), String::from("lm"));', 'String::from("hi")), String::from("'),
        ("assert(add((1l.toLong)).equals((List[Long](5l.toLong))));", "add((1l.toLong)).equals((List[Long]("),
        ('assert(groups("(()) ()") == ["(())"]);', 'groups("(()) ()") == ["'),
        (r'assert(f("import x from it") == "a\n\x41\u00e4");', r'f("import x from it") == "'),
    ],
)
def test_expected_values_that_are_hard_to_find_are_changed(check: str, kept: str) -> None:
    changed = changed_tests(check)
    assert len(changed) > 1
    assert all(kept in text for text in changed)
    assert all(text.endswith(r'\n\x41\u00e4");') for text in changed if "x41" in check)


def test_a_text_of_escapes_alone_is_left_as_it_is() -> None:
    assert changed_tests(r'assert(f(x) == "\n");') == []


def test_php_has_the_functions_for_characters(sandbox: Sandbox, tmp_path: Path) -> None:
    """Debian has them in an extension, which a file in /etc names."""
    task = load_task("multipl-e", written(tmp_path / "x.jsonl", multipl_e_row("php")))
    program = "    return ctype_digit((string) ($a + $b)) ? $a + $b : 0;\n}\n"
    (found,) = run_samples(task, [Sample("HumanEval_0_add", program)], sandbox)
    assert found.kind in ("passed", "not_run"), found


def test_every_language_of_the_table_has_a_program_here() -> None:
    assert {multipl_e._language(name) for name in ADD} == set(multipl_e.table())
    assert len(multipl_e.table()) + 1 >= 18


def test_multipl_e_in_python_and_unknown_languages(sandbox: Sandbox, tmp_path: Path) -> None:
    row = multipl_e_row("js") | {
        "language": "py", "prompt": "def add(a: int, b: int) -> int:\n",
        "tests": "def check(f):\n    assert f(1, 2) == 3\n\ndef test_check():\n    check(add)\n\ntest_check()\n",
    }  # fmt: skip
    task = load_task("multipl-e", written(tmp_path / "x.jsonl", row))
    assert isinstance(task.build(task.problems[0], ""), Program)
    assert kinds(task, sandbox, "    return a + b\n", "    return 3 - a\n") == ["passed", "failed"]
    with pytest.raises(UserError, match=r"language cobol is not supported; choose one of: py, cpp"):
        load_task("multipl-e", written(tmp_path / "x.jsonl", row | {"language": "cobol"}))
    with pytest.raises(UserError, match="several languages"):
        load_task("multipl-e", written(tmp_path / "x.jsonl", row, multipl_e_row("js")))


def test_literals_with_a_suffix_are_changed() -> None:
    changed = changed_tests("assert(f(1.5f) == (5l));")
    assert len(set(changed)) == 8
    assert all(text.startswith("assert(f(1.5f) == (") and text.endswith("l));") for text in changed)
    assert read_rows("x", b'[{"a": 1}]', ("a",)) == [{"a": 1}]


def test_a_tool_that_is_too_old_for_the_sandbox_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multilingual.shutil, "which", lambda tool, path=None: f"/usr/bin/{tool}")
    problem = Problem("x", "fn add() {", "", "}\nfn main() {\n}\n", language="rs")
    for version, expected in (((1, 63), SandboxVerdict), ((), SandboxVerdict), ((1, 67), CommandProgram)):
        monkeypatch.setattr(multilingual, "_version", lambda tool, version=version: version)
        built = multilingual.command_program(problem, "", multipl_e.table())
        assert isinstance(built, expected)
        if isinstance(built, SandboxVerdict):
            assert built.kind == "not_run"
            assert "runs in the sandbox from 1.67 on" in built.detail
