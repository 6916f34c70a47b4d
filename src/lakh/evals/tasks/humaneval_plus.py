"""HumanEval+: HumanEval's problems with about 80 times more inputs (arXiv 2305.01210; data Apache-2.0, EvalPlus).

Read in the form of its release: inputs and a reference, which the examiner runs for the expected values. Values are
compared as EvalPlus does: equal, or of the same type and within the row's tolerance plus 1e-7 of the value. From the
first expected float on, a row without a tolerance has 1e-6; the benchmark's first inputs and the added ones are two
lists in this. find_zero is checked by the value of the polynomial there. MBPP+ (mbpp_plus.py) has the same form.
"""

from __future__ import annotations

from typing import Any

from lakh.evals.data import BenchmarkFile
from lakh.evals.task import Problem, Program, Task, problems_from
from lakh.evals.tasks.humaneval import STOPS

__all__ = ["FILE", "FILES", "KEYS", "comparison", "inputs_text", "load"]

_RELEASE = "https://raw.githubusercontent.com/evalplus/humanevalplus_release/200defce9e3429d28ca215b6dd061c0f7f31c18b/"
_SHA256 = "272720b90ac375502c8ed23cd791c2a93dfb22a911641a494da74a426c09f101"
_MINI_SHA256 = "91486741f1627101021fbe50523df08eebb5b0bf5e804b633dcd5ca3c14dbd2f"
FILE = BenchmarkFile("HumanEvalPlus.jsonl.gz", _SHA256, _RELEASE)
FILES = {
    "humaneval-plus": FILE,
    "humaneval-plus-mini": BenchmarkFile("HumanEvalPlus-Mini.jsonl.gz", _MINI_SHA256, _RELEASE),
}
KEYS = ("task_id", "prompt", "canonical_solution", "entry_point", "base_input", "plus_input", "atol")

_CHECK = """
import copy

def _floats(value):
    if isinstance(value, (list, tuple)) and value:
        return all(isinstance(item, float) for item in value)
    return isinstance(value, float)

def _close(got, expected, atol):
    if isinstance(got, complex) or isinstance(expected, complex):
        return isinstance(got, (int, float, complex)) and abs(got - expected) <= atol + 1e-7 * abs(expected) < inf
    if isinstance(expected, (list, tuple)):
        same_length = isinstance(got, (list, tuple)) and len(got) == len(expected)
        return same_length and all(_close(a, b, atol) for a, b in zip(got, expected))
    if not isinstance(got, (int, float)) or not isinstance(expected, (int, float)):
        return False
    return got == expected or abs(got - expected) <= atol + 1e-7 * abs(expected) < inf

def _check(candidate, reference, inputs, atol):
    for number, given in enumerate(inputs):
        got = candidate(*copy.deepcopy(given))
        if candidate_name == "find_zero":
            assert abs(poly(given[0], got)) <= (atol or 1e-4), f"input {number}"
            continue
        expected = reference(*copy.deepcopy(given))
        equal = _is_equal(got, expected, given, atol)
        if not atol and _floats(expected):
            atol = 1e-6
        same = atol and type(got) is type(expected) and _close(got, expected, atol)
        assert equal or same, f"input {number}"

def _is_equal(got, expected, given, atol):
    return bool(got == expected)
"""


def load(data: str | None = None, *, name: str = "humaneval-plus") -> Task:
    rows = FILES[name].rows(data, KEYS)
    for row in rows:
        row["test"] = inputs_text(row["base_input"], row["plus_input"], row["atol"])
    return Task(
        name=name,
        problems=problems_from(rows),
        stops=STOPS,
        data_sha256=FILES[name].sha256,
        build=_program,
    )


def inputs_text(base: list[Any], plus: list[Any], atol: float | None) -> str:
    return f"_base, _plus = {base!r}, {plus!r}\n_atol = {float(atol or 0)!r}\n"


def comparison(problem: Problem, is_equal: str = "") -> str:
    """The test of a problem; `is_equal` may define another `_is_equal`."""
    name = problem.entry_point
    prelude = "from math import inf, nan\n"  # JSON's Infinity and NaN, as repr writes them
    return (
        f"{prelude}{_CHECK}{is_equal}\ncandidate_name = {name!r}\n{problem.test}"
        f"for _inputs in (_base, _plus):\n    _check({name}, _reference, _inputs, _atol)\n"
    )


def _program(problem: Problem, completion: str) -> Program:
    name = problem.entry_point
    return Program(
        source=problem.prompt + completion + "\n",
        test=comparison(problem),
        reference=f"{problem.prompt}{problem.canonical}\n_reference = {name}\n",
        names=(name,),
    )
