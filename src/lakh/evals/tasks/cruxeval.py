"""CRUXEval: predict what a function returns, and find arguments for an output (arXiv 2401.03065; data MIT, Meta).

    cruxeval-output   800 problems: the value of f(input)
    cruxeval-input    800 problems: arguments for which f gives the output
    cruxeval          both

The function runs in the examiner only: the candidate is an expression, evaluated where there is no f to call. The
prompt is an assert to complete, without examples; published figures use other prompts.
"""

from __future__ import annotations

import ast
from typing import Any

from lakh.evals.data import BenchmarkFile
from lakh.evals.task import Problem, Program, Task

__all__ = ["NAMES", "load"]

FILE = BenchmarkFile(
    "cruxeval.jsonl",
    "8368b81047dc5014e4caf5a2f97604eff7644e0ecd7415e3ceeb184bbc2e0c96",
    "https://raw.githubusercontent.com/facebookresearch/cruxeval/main/data/",
)
OUTPUT, INPUT = "/output", "/input"
# Arguments are data: methods of an object of the candidate could return whatever the test compares with. Two reference
# inputs have a function among their arguments; such a place takes anything.
CALL = """def _is_plain(value):
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes, range)

_arguments, _named = answer()
assert all(_is_plain(value) or place in FUNCTIONS for place, value in enumerate(_arguments)) and _is_plain(_named)
assert f(*_arguments, **_named)"""
NAMES = ("cruxeval", "cruxeval-output", "cruxeval-input")


def load(data: str | None = None, *, name: str = "cruxeval") -> Task:
    rows = FILE.rows(data, ("id", "code", "input", "output"))
    makers = {"cruxeval": (_output, _input), "cruxeval-output": (_output,), "cruxeval-input": (_input,)}
    return Task(
        name=name,
        problems=tuple(make(row) for make in makers[name] for row in rows),
        stops=("\n",),
        prompt_form="assert to complete, no examples",
        extraction="the first line, for input up to its closing bracket",
        data_sha256=FILE.sha256,
        build=_program,
    )


def _output(row: dict[str, Any]) -> Problem:
    return Problem(
        id=row["id"] + OUTPUT,
        prompt=f"{row['code']}\n\nassert f({row['input']}) ==",
        canonical=f" {row['output']}",
        test=f"assert answer() == {row['output']}\n",
    )


def _input(row: dict[str, Any]) -> Problem:
    return Problem(
        id=row["id"] + INPUT,
        prompt=f"{row['code']}\n\nassert {row['output']} == f(",
        canonical=f"{row['input']})",
        suffix=_constants(row["code"]),
        test=f"{row['code']}\n\nFUNCTIONS = {_functions(row['input'])}\n{CALL} == {row['output']}\n",
    )


def _functions(arguments: str) -> tuple[int, ...]:
    """The places of functions among the reference arguments."""
    call = ast.parse(f"f({arguments})", mode="eval").body
    assert isinstance(call, ast.Call)
    return tuple(place for place, value in enumerate(call.args) if isinstance(value, ast.Lambda))


def _constants(code: str) -> str:
    """The code without its functions: arguments may use names that are defined next to f."""
    body = [node for node in ast.parse(code).body if not isinstance(node, ast.FunctionDef)]
    return ast.unparse(ast.Module(body, type_ignores=[]))


def _program(problem: Problem, completion: str) -> Program:
    text = completion.strip()
    if problem.id.endswith(OUTPUT):
        source = f"TEXT = {text!r}\ndef answer():\n    return eval(TEXT, {{}})\n"
    else:
        text = text.rpartition(")")[0] if ")" in text else text
        source = (
            f"{problem.suffix}\nTEXT = {text!r}\ndef both(*arguments, **named):\n    return arguments, named\n"
            "def answer():\n    return eval(f'both({TEXT})')\n"
        )
    return Program(source=source, test=problem.test, names=("answer",))
