"""MBPP+: 378 problems of MBPP with about 35 times more inputs (arXiv 2305.01210; data Apache-2.0, EvalPlus).

The prompt is a docstring with one assert, and a completion is the whole program after it. Values are compared as for
HumanEval+. JSON has no tuples, sets or complex numbers: for some problems EvalPlus turns lists into these. A few
problems have a test of their own, because more than one answer is right.
"""

from __future__ import annotations

from typing import Any

from lakh.evals.data import BenchmarkFile
from lakh.evals.sandbox.verdict import SandboxLimits
from lakh.evals.task import Problem, Program, Task, problems_from
from lakh.evals.tasks.humaneval_plus import KEYS, comparison, inputs_text

__all__ = ["FILE", "arguments_of", "load"]

_RELEASE = "https://raw.githubusercontent.com/evalplus/mbppplus_release/dadf43da556a00f7bacd71cb154f2932757d9144/"
FILE = BenchmarkFile("MbppPlus.jsonl.gz", "af43697e8791c4c149bdfd6b489d8b5412507551ac20e28a439f650b8225db63", _RELEASE)
STOPS = ("\nclass ", "\nassert ", '\n"""', "\nprint(", "\nif __name__")

# Numbers of problems by what their arguments are, if not as in JSON.
_TUPLES = {2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630, 726, 740, 744, 809}
_LISTS_OF_TUPLES = {63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780}
_TUPLES_OF_TUPLES = {259, 401, 445}
_FIRST_LIST_OF_TUPLES = {75, 413, 444, 753}
_FIRST_TUPLE = {250, 307, 405, 446, 617, 720, 763, 808}
_SECOND_TUPLE = {106, 750}
_ALL_TUPLES = {580, 615, 791}

_IS_EQUAL = """
import math

def _is_equal(got, expected, given, atol):
    name = candidate_name
    if name in ("check_str", "text_match_three", "text_starta_endb"):  # they may return a match
        return got == (expected is not None) if isinstance(got, bool) else (expected is None) == (got is None)
    if name in ("similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum",
                "intersection_array", "find_dissimilar", "Diff"):  # in any order
        return set(got) == set(expected)
    if got == expected or name == "are_equivalent":
        return True
    if name == "sum_div":
        return got == 0
    if name == "surface_Area":  # the height of the pyramid instead of the slant
        base, height = given
        return abs(got - round(base**2 + 2 * base * math.sqrt((base / 2) ** 2 + height**2))) <= atol
    if name == "digit_distance_nums":  # digit by digit
        first, second = (str(number) for number in given)
        width = max(len(first), len(second))
        return got == sum(abs(int(a) - int(b)) for a, b in zip(first.zfill(width), second.zfill(width)))
    return False
"""


def load(data: str | None = None) -> Task:
    rows = FILE.rows(data, KEYS)
    for row in rows:
        base, plus = (
            [arguments_of(row["task_id"], given) for given in row[key]] for key in ("base_input", "plus_input")
        )
        row["test"] = inputs_text(base, plus, row["atol"])
    return Task(
        name="mbpp-plus",
        problems=problems_from(rows),
        stops=STOPS,
        prompt_form="docstring with one assert",
        data_sha256=FILE.sha256,
        build=_program,
        limits=SandboxLimits(memory_MiB=4096),  # what EvalPlus allows; the reference of Mbpp/255 needs 2 GiB
    )


def arguments_of(task_id: str, given: list[Any]) -> list[Any]:
    """The arguments of one call, from those in JSON."""
    number = int(task_id.rpartition("/")[2])
    if number in _TUPLES:
        return [tuple(one) for one in given]
    if number in _LISTS_OF_TUPLES:
        return [[tuple(item) for item in one] for one in given]
    if number in _TUPLES_OF_TUPLES:
        return [tuple(tuple(item) for item in one) for one in given]
    if number in _FIRST_LIST_OF_TUPLES:
        return [[tuple(item) for item in given[0]], given[1]]
    if number in _FIRST_TUPLE:
        return [tuple(given[0]), *given[1:]]
    if number in _SECOND_TUPLE:
        return [given[0], tuple(given[1])]
    if number in _ALL_TUPLES:
        return [_as_tuples(one) for one in given]
    if number == 115:
        return [[set(item) if isinstance(item, list) and item else {} for item in given[0]]]
    if number == 124:
        return [float(given[0]), complex(given[1])]
    if number == 252:
        return [complex(given[0])]
    if number == 278:
        return [tuple(tuple(item) if isinstance(item, list) else item for item in given[0])]
    if number == 722:
        return [{key: tuple(value) for key, value in given[0].items()}, *given[1:]]
    return given


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def _program(problem: Problem, completion: str) -> Program:
    name = problem.entry_point
    return Program(
        source=problem.prompt + completion + "\n",
        test=comparison(problem, _IS_EQUAL),
        reference=f"{problem.canonical}\n_reference = {name}\n",
        names=(name,),
    )
