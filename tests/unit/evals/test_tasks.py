"""The benchmarks: their data, their reference solutions, and wrong answers."""

from __future__ import annotations

import functools
import http.server
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lakh import storage
from lakh.errors import UserError
from lakh.evals import data
from lakh.evals.data import BenchmarkFile
from lakh.evals.generation.samples import Sample, canonical_samples
from lakh.evals.run import run_samples
from lakh.evals.sandbox import Sandbox
from lakh.evals.sandbox.verdict import SandboxVerdict
from lakh.evals.task import CommandProgram, Problem, Program, names_under_test
from lakh.evals.tasks import TASKS, cruxeval, humaneval_plus, load_task
from lakh.evals.tasks.control_tests import changed_tests, parts_of_test
from lakh.evals.tasks.multilingual import LIMITS, _program, languages

SIZES = {
    "mbpp": 974,
    "mbpp-test": 500,
    "mbpp-sanitized": 427,
    "infilling": 1033,
    "infilling-random-span-light": 164,
    "cruxeval": 1600,
    "cruxeval-output": 800,
    "cruxeval-input": 800,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_task_has_every_problem_once(benchmarks: Path, name: str) -> None:
    task = load_task(name, str(benchmarks))
    assert task.name == name
    assert len(task.problems) == len({problem.id for problem in task.problems}) == SIZES[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "limit"), [("mbpp", 974), ("mbpp-sanitized", 120), ("infilling", 300), ("cruxeval", 120)]
)
def test_reference_solutions_pass(benchmarks: Path, sandbox: Sandbox, name: str, limit: int) -> None:
    task = load_task(name, str(benchmarks)).first(limit)
    cpu_s = dict.fromkeys([problem.id for problem in task.problems], 60)
    verdicts = run_samples(task, canonical_samples(task), sandbox, cpu_s=cpu_s)
    assert {p.id: v for p, v in zip(task.problems, verdicts, strict=True) if not v.passed} == {}


def test_reference_solutions_pass_and_those_of_other_problems_fail(benchmarks: Path, sandbox: Sandbox) -> None:
    for name in ("mbpp", "mbpp-sanitized", "infilling-random-span-light", "cruxeval-output"):
        task = load_task(name, str(benchmarks)).first(3)
        own = canonical_samples(task)
        swapped = [Sample(a.task_id, b.completion) for a, b in zip(own, own[1:] + own[:1], strict=True)]
        assert [v.kind for v in run_samples(task, own, sandbox)] == ["passed"] * 3, name
        assert "passed" not in [v.kind for v in run_samples(task, swapped, sandbox)], name


@pytest.mark.parametrize("number", [367, 927, 601, 533, 126])  # trees of their own classes, a type as argument, `sum`
def test_mbpp_problems_that_exchange_more_than_plain_values(benchmarks: Path, sandbox: Sandbox, number: int) -> None:
    task = load_task("mbpp", str(benchmarks))
    problem = next(problem for problem in task.problems if problem.id == f"Mbpp/{number}")
    assert sandbox.run(task.build(problem, problem.canonical)).passed  # type: ignore[arg-type]


def test_the_mbpp_prompt_has_three_examples_and_ends_before_the_program(benchmarks: Path) -> None:
    prompt = load_task("mbpp", str(benchmarks)).problems[20].prompt
    assert prompt.count("[BEGIN]") == 4
    assert prompt.count("[DONE]") == 3
    assert prompt.endswith("[BEGIN]\n")
    assert "\r" not in prompt


CRUX = {
    "sample_0/output": [("[(4, 1), (4, 1), (4, 1), (4, 1), (2, 3), (2, 3)]", True), ("f([1, 1, 3, 1, 3, 1])", False),
                        ("[]", False), ("", False)],
    "sample_0/input": [("[1, 1, 3, 1, 3, 1])", True), ("[3, 1, 1, 3, 1, 1]) #", True), ("[1])", False), (")", False)],
}  # fmt: skip


@pytest.mark.parametrize("task_id", CRUX)
def test_cruxeval_accepts_any_correct_value_and_no_call_of_f(benchmarks: Path, sandbox: Sandbox, task_id: str) -> None:
    task = load_task("cruxeval", str(benchmarks))
    samples = [Sample(task_id, text) for text, _ in CRUX[task_id]]
    assert [v.passed for v in run_samples(task, samples, sandbox)] == [right for _, right in CRUX[task_id]]


DUCK = "type('D', (), {'solve': lambda self: [(4, 1)] * 4 + [(2, 3)] * 2})())"


@pytest.mark.parametrize("text", [DUCK, f"[{DUCK[:-1]}])", f"{{1: {DUCK[:-1]}}})"])
def test_arguments_of_cruxeval_are_data(benchmarks: Path, sandbox: Sandbox, text: str) -> None:
    """An object whose every method returns the wanted output is not an input."""
    code = "def f(nums):\n    return nums.solve()\n"
    row = {"id": "duck", "code": code, "input": "0", "output": "[(4, 1), (4, 1), (4, 1), (4, 1), (2, 3), (2, 3)]"}
    problem = cruxeval._input(row)
    task = replace(load_task("cruxeval-input", str(benchmarks)), problems=(problem,))
    (verdict,) = run_samples(task, [Sample(problem.id, text)], sandbox)
    assert not verdict.passed


def plus_row(**changes: object) -> dict[str, object]:
    row = {
        "task_id": "HumanEval/0", "prompt": "def half(x):\n", "canonical_solution": "    return x / 2\n",
        "entry_point": "half", "base_input": [[2]], "plus_input": [[1], [1e9], [float("inf")]], "atol": 0,
    }  # fmt: skip
    return row | changes


@pytest.mark.parametrize(
    ("completion", "passes"),
    [
        ("    return x * 0.5\n", True),
        ("    return x / 2 + 1e-9\n", True),
        ("    return x / 2 + 1e-3\n", False),
        ("    return x // 2\n", False),
        ("    return None\n", False),
    ],
)
def test_humaneval_plus_compares_with_its_reference(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, completion: str, passes: bool
) -> None:
    monkeypatch.setattr(BenchmarkFile, "_checked", lambda self, where, raw: raw)
    (tmp_path / "HumanEvalPlus.jsonl.gz").write_text(json.dumps(plus_row()) + "\n")
    task = load_task("humaneval-plus", str(tmp_path))
    assert run_samples(task, [Sample("HumanEval/0", completion)], sandbox)[0].passed is passes


@pytest.mark.parametrize(
    ("got", "expected", "atol", "passes"),
    [
        ((), [], 0, False),
        ((1.0, 2.0), [1.0, 2.0], 0, False),
        ([1.0, 2.0 + 1e-8], [1.0, 2.0], 0, True),
        ([1, 2.0], [1.0, 2.0], 0, True),
        (1, 1.0000001, 0, False),
        (2, 2.0, 0, True),
        (True, 1, 0, True),
        ([[1.0, 2.0 + 1e-8]], [[1.0, 2.0]], 0, False),
        ([[1.0, 2.0 + 1e-8]], [[1.0, 2.0]], 1e-6, True),
        (float("nan"), float("nan"), 0, False),
        (2.5, float("inf"), 0, False),
        (float("inf"), float("inf"), 0, True),
        ("1.0", 1.0, 1e-6, False),
        ([1.0], [1.0, 2.0], 1e-6, False),
    ],
)
def test_odd_values_are_compared_as_evalplus_does(got: object, expected: object, atol: float, passes: bool) -> None:
    """The expected verdicts are those of evalplus 0.3.1 (evalplus.eval.unsafe_execute)."""
    names: dict[str, Any] = {"candidate_name": "f", "inf": float("inf")}
    exec(humaneval_plus._CHECK, names)
    with nullcontext() if passes else pytest.raises(AssertionError):
        names["_check"](lambda: got, lambda: expected, [[]], atol)


# --- other languages ---------------------------------------------------------------------------------------------

ADD = {
    "javascript": ("function add(a, b) {\n", "    return a + b;\n}\n", 'const _ = require("lodash")\n'
                   "if (!_.isEqual([add(1, 2)], [3])) { throw 'Error'; }\n"),
    "java": ("class Add {\n    public static int add(int a, int b) {\n", "        return a + b;\n    }\n}\n",
             "class Main {\n    public static void main(String[] args) throws Exception {\n"
             '        if (Add.add(1, 2) != 3) { throw new java.lang.Exception("no"); }\n}\n}\n'),
    "cpp": ("#include <iostream>\n#include <stdexcept>\nusing namespace std;\n"
            "int add(int a, int b) {\n", "    return a + b;\n}\n",
            "int main() {\n    if (add(1, 2) != 3) { throw runtime_error(\"no\"); }\n    return 0;\n}\n"),
    "go": ('package main\nimport "os"\nvar _ = os.Args\nfunc add(a int, b int) int {\n', "\treturn a + b\n}\n",
           'func main() {\n\tif add(1, 2) != 3 { panic("no") }\n}\n'),
    "rust": ("fn add(a: i64, b: i64) -> i64 {\n", "    a + b\n}\n", "fn main() {\n    assert_eq!(add(1, 2), 3);\n}\n"),
}  # fmt: skip
LEAVES = {
    "javascript": "    process.exit(0);\n}\n",
    "java": "        System.exit(0); return 3;\n    }\n}\n",
    "cpp": "    exit(0);\n}\n",
    "go": "\tos.Exit(0)\n\treturn 3\n}\n",
    "rust": "    std::process::exit(0)\n}\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("language", ADD)
def test_other_languages_pass_fail_and_cannot_exit_early(sandbox: Sandbox, language: str) -> None:
    prompt, body, test = ADD[language]
    problem = Problem("X/0", prompt, body, test, "add", language=language)
    right = _program(problem, body)
    missing = [tool for tool in languages()[language].tools if shutil.which(tool, path="/usr/bin:/bin") is None]
    if missing:
        assert isinstance(right, SandboxVerdict)
        assert right.kind == "not_run"
        assert missing[0] in right.detail
        return
    if isinstance(right, SandboxVerdict):  # a compiler that is too old for the sandbox
        assert languages()[language].least_versions
        assert right.kind == "not_run"
        return
    assert isinstance(right, CommandProgram)
    assert sandbox.run(right, LIMITS).kind == "passed"
    wrong = _program(problem, body.replace("a + b", "a - b"))
    early = _program(problem, LEAVES[language])
    assert isinstance(wrong, CommandProgram)
    assert isinstance(early, CommandProgram)
    assert sandbox.run(wrong, LIMITS).kind == "failed"
    verdict = sandbox.run(early, LIMITS)
    assert verdict.kind == "failed"
    assert "ended before its test did" in verdict.detail


# Each finds the nonce in its own source or binary, prints it and exits with 0.
READS_THE_NONCE = {
    "javascript": "    const text = require('fs').readFileSync(__filename, 'utf8');\n"
    "    console.log(text.match(/[0-9a-f]{32}/)[0]);\n    process.exit(0);\n}\n",
    "java": "        try {\n            String text = new String(java.nio.file.Files.readAllBytes("
    'java.nio.file.Path.of("main.java")));\n'
    '            java.util.regex.Matcher m = java.util.regex.Pattern.compile("[0-9a-f]{32}").matcher(text);\n'
    "            m.find();\n            System.out.println(m.group());\n        } catch (Exception e) { }\n"
    "        System.exit(0); return 3;\n    }\n}\n",
    "cpp": '    FILE* f = fopen("main.cpp", "r");\n    static char text[1 << 16];\n'
    "    fread(text, 1, sizeof text - 1, f);\n"
    "    for (char* p = text; *p; p++) {\n"
    '        if (strspn(p, "0123456789abcdef") >= 32) { p[32] = 0; puts(p); fflush(stdout); _Exit(0); }\n'
    "    }\n    return 3;\n}\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("language", READS_THE_NONCE)
def test_a_program_that_prints_the_nonce_itself_does_not_pass(sandbox: Sandbox, language: str) -> None:
    prompt, _, test = ADD[language]
    if language == "cpp":
        prompt = "#include <cstdio>\n#include <cstdlib>\n#include <cstring>\n" + prompt
    found = _program(Problem("A/0", prompt, "", test, "add", language=language), READS_THE_NONCE[language])
    if isinstance(found, SandboxVerdict):
        pytest.skip(found.detail)
    assert sandbox.run(replace(found, controls=()), LIMITS).passed  # it works without the controls
    verdict = sandbox.run(found, LIMITS)
    assert (verdict.kind, verdict.detail.split(":")[0]) == ("failed", "passes changed tests too")


def test_changed_tests_have_other_expected_values() -> None:
    test = "if (add(1, 2) != 3) { throw \"case 7\"; }  // x1 y2\ncheck(f(4, 1.5), 'a');\ncheck(f(5), true);"
    changed = changed_tests(test, random.Random(0))
    assert len(changed) == len(set(changed)) == 8
    for text in changed:
        lines = text.split("\n")
        assert lines[0].startswith("if (add(1, 2) != ")
        assert lines[0].endswith(') { throw "case 7"; }  // x1 y2')
        assert lines[1].startswith("check(f(4, 1.5), '")
        assert sum(a != b for a, b in zip(lines, test.split("\n"), strict=True)) >= 2
    assert changed_tests("check(f(x));") == []


def test_a_test_with_one_truth_has_one_changed_test() -> None:
    assert changed_tests("assert(f([1, 2]) == true);") == ["assert(f([1, 2]) == false);"]


def test_the_expected_value_of_ruby_comes_first() -> None:
    changed = changed_tests("assert_equal([9], candidate.call([1, 2, 3]))", random.Random(1))
    assert any("equal([9]" not in one for one in changed)
    assert all("call([1, 2, " in one for one in changed)


def test_parts_of_a_test_lack_some_checks() -> None:
    checks = [f'  assert(f({n}) ==\n    ("{n})"));\n' for n in range(4)]
    parts = parts_of_test("open {\n" + "".join(checks) + "}\nassert(", random.Random(0))
    assert len(set(parts)) == len(parts) == 2**4 - 2
    for part in parts:
        assert part.startswith("open {\n")
        assert part.endswith("}\nassert(")
        assert 1 <= sum(check in part for check in checks) <= 3
    assert parts_of_test("assert(f(1) == 2);\nx = 3;") == []


def test_a_language_without_tools_is_not_run_and_not_a_failure(tmp_path: Path, sandbox: Sandbox) -> None:
    row = {
        "task_id": "X/0",
        "prompt": "",
        "test": "",
        "language": "cobol",
        "entry_point": "",
        "canonical_solution": "x",
    }
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    task = load_task("mbxp", str(tmp_path / "x.jsonl"))
    assert run_samples(task, canonical_samples(task), sandbox)[0].kind == "not_run"


OWN_ROW = {
    "task_id": "own/0", "prompt": "def twice(x):\n", "canonical_solution": "    return 2 * x\n", "entry_point": "twice",
    "test": "def check(candidate):\n    assert candidate(4) == 8\n",
}  # fmt: skip


def test_own_problems_in_the_form_of_humaneval(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(OWN_ROW) + "\n")
    task = load_task("functions", str(path))
    samples = [*canonical_samples(task), Sample("own/0", "    return x\n")]
    assert [verdict.passed for verdict in run_samples(task, samples, sandbox)] == [True, False]
    with pytest.raises(UserError, match="needs a file"):
        load_task("functions")


def test_a_task_in_a_file_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    (tmp_path / "own.jsonl").write_text(json.dumps(OWN_ROW) + "\n")
    path.write_text("from lakh.evals.tasks import humaneval\nload = humaneval.load_own\n")
    assert [problem.id for problem in load_task(str(path), str(tmp_path / "own.jsonl")).problems] == ["own/0"]
    for text, found in (
        ("x = 1", "no function load"),
        ("1 / 0", "ZeroDivisionError"),
        ("def load(data): pass", "NoneType"),
    ):
        path.write_text(text + "\n")
        with pytest.raises(UserError, match=found):
            load_task(str(path))
    with pytest.raises(UserError, match="no such file"):
        load_task("missing.py")


# --- where the data comes from -----------------------------------------------------------------------------------


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "x.jsonl").write_bytes(b'{"a": 1}\n')
    handler = functools.partial(Quiet, directory=str(tmp_path / "web"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


HASH = "d7cafbeeef02254b9c0fe75f9fc08dfea2ba1c62e7dc94ac171e06f6a2aa6fb4"


def test_a_file_is_downloaded_once_and_checked(web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = BenchmarkFile("x.jsonl", hashlib.sha256(b'{"a": 1}\n').hexdigest(), web)
    assert file.read(None) == b'{"a": 1}\n'
    (tmp_path / "web" / "x.jsonl").unlink()
    assert file.read(None) == b'{"a": 1}\n'
    (storage.cache_folder("benchmarks") / "x.jsonl").write_bytes(b"changed")
    with pytest.raises(UserError, match="has sha256"):
        file.read(None)


def test_a_download_with_a_wrong_hash_is_not_cached(web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="has sha256"):
        BenchmarkFile("x.jsonl", HASH, web).read(None)
    assert not (storage.cache_folder("benchmarks") / "x.jsonl").exists()
    for name, folder in (("none.jsonl", web), ("x.jsonl", "http://127.0.0.1:9/")):
        with pytest.raises(UserError, match=r"cannot be downloaded.*--data"):
            BenchmarkFile(name, HASH, folder).read(None)


@pytest.mark.parametrize(
    ("raw", "finding"),
    [(b"", "holds no problems"), (b"{", "is not JSON lines"), (b'{"b": 1}\n', "has no a"), (b"\x1f\x8bxx", "not JSON")],
)
def test_damaged_rows_are_errors(raw: bytes, finding: str) -> None:
    with pytest.raises(UserError, match=finding):
        data.read_rows("x.jsonl", raw, ("a",))


# --- lines -------------------------------------------------------------------------------------------------------


def test_line_completion_selects_the_same_lines_every_time(code_dir: Path) -> None:
    task, again = load_task("line-completion", str(code_dir)), load_task("line-completion", str(code_dir))
    assert task.problems == again.problems
    assert task.data_sha256 == again.data_sha256
    problem = task.problems[0]
    name, _, number = problem.id.rpartition(":")
    line = (code_dir / name).read_text().split("\n")[int(number) - 1]
    assert (problem.prompt.rpartition("\n")[2] + problem.canonical).rstrip() == line.rstrip()
    assert task.build(problem, problem.canonical + "  \nmore") == SandboxVerdict("passed")
    assert task.build(problem, "x" + problem.canonical).kind == "failed"  # type: ignore[union-attr]


def test_file_names_may_be_invalid_utf8(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/caf\xe9.py", "w") as file:
        file.write("def total(numbers):\n    result = 0\n    for number in numbers:\n        result += number\n")
    task = load_task("line-completion", str(tmp_path))
    assert task.problems[0].id.startswith("caf\\udce9.py:")


def test_line_completion_without_usable_data_is_an_error(tmp_path: Path) -> None:
    for path, finding in ((None, "give --data FOLDER"), (str(tmp_path), "no source files"), ("/none", "no such file")):
        with pytest.raises(UserError, match=finding):
            load_task("line-completion", path)


def test_only_names_that_the_reference_defines_come_from_the_candidate() -> None:
    reference = "import math\ndef helper(): pass\ndef area(r): return math.pi * r\nclass Pair: pass\n"
    test = "assert abs(area(1) - math.pi) < 1e-6\nassert Pair()\n"
    assert names_under_test(reference, test) == ("area", "Pair")


def test_a_candidate_cannot_change_the_builtins_of_its_test(sandbox: Sandbox) -> None:
    source = "def area(r): return 0\ndef abs(x): return 0\n"
    program = Program(source, "assert abs(area(1) - 3) < 1e-6", "def area(r): return 3 * r", ("area",))
    assert sandbox.run(program).kind == "failed"


def test_in_place_changes_of_arguments_reach_the_test(sandbox: Sandbox) -> None:
    source = "def fill(items, table):\n    items.append(len(items)); table['n'] = items[:]; items.reverse()\n"
    test = (
        "items, table = [5], {}\nassert fill(items, table) is None\nassert items == [1, 5] and table == {'n': [5, 1]}"
    )
    assert sandbox.run(Program(source, test, names=("fill",))).passed


def test_iterators_instances_and_errors_of_the_candidate_can_be_used(sandbox: Sandbox) -> None:
    source = (
        "class Box:\n    def __init__(self, x): self.x = x\n    def twice(self): return 2 * self.x\n"
        "def up(n):\n    yield from range(n)\n"
        "def fail(): raise KeyError('gone')\n"
    )
    test = (
        "box = Box(4)\nassert box.x == 4 and box.twice() == 8\nbox.x = Box(1)\nassert box.x.x == 1\n"
        "assert list(up(3)) == [0, 1, 2]\nassert up(3) != [0, 1, 2]\n"
        "try:\n    fail()\nexcept KeyError:\n    caught = True\nassert caught\n"
    )
    verdict = sandbox.run(Program(source, test, names=("Box", "up", "fail")))
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_without_data_says_what_it_needs(
    name: str, tmp_path: Path, lakh: Callable[..., tuple[int, str, str]], last_line: Callable[[str], dict[str, object]]
) -> None:
    code, out, err = lakh("eval", "score", "--canonical", "--task", name, "--data", str(tmp_path / "none"), "--json")
    assert code == 2
    assert "no such file" in err
    assert "error" in last_line(out)
