"""LiveCodeBench's code generation: problems of programming contests, in the form of its release (arXiv 2403.07974).

--data names a file of the release (test.jsonl, test2.jsonl, ...); its sha256 in the result identifies it. A completion
is the whole program. Problems without starter code read standard input and write standard output; outputs are compared
line by line without white space at their ends, numbers by value. The others have a class Solution with a method, whose
result has to equal the expected value; a tuple counts as a list.

A case may take CASE_CPU_S seconds of CPU time. There are no reference solutions, so nothing is calibrated.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import pickle
import zlib
from typing import Any

from lakh import storage
from lakh.errors import UserError
from lakh.evals.data import read_rows
from lakh.evals.sandbox.verdict import SandboxLimits
from lakh.evals.task import Problem, Program, Task

__all__ = ["KEYS", "last_block", "load"]

KEYS = ("question_id", "question_content", "starter_code", "public_test_cases", "private_test_cases", "metadata")
CASE_CPU_S = 6
LIMITS = SandboxLimits(cpu_s=120, wall_s=900, memory_MiB=2048, output_KiB=16384)

# What programs of contests may use without importing it, in the benchmark's order: the builtins come after operator,
# whose pow has two arguments, and the module datetime after its class.
_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
_IMPORTS = (
    "".join(f"from {name} import *\n" for name in f"{_MODULES} builtins typing".split())
    + f"import {_MODULES.replace(' ', ', ')}\nsys.setrecursionlimit(50000)\n"
)

# In the candidate's process: runs the program once for every case, with the case's text as standard input.
_RUNNER = """
import builtins as _builtins, io as _io, signal as _signal, sys as _sys

_code = compile(TEXT, "<solution>", "exec", dont_inherit=True)
_open = _builtins.open

def run_case(text):
    _signal.setitimer(_signal.ITIMER_PROF, CASE_CPU_S)
    given, written = _io.TextIOWrapper(_io.BytesIO(text.encode())), _io.TextIOWrapper(_io.BytesIO())
    saved = _sys.stdin, _sys.stdout
    _sys.stdin, _sys.stdout = given, written
    _builtins.open = lambda file, *rest, **named: given if file == 0 else _open(file, *rest, **named)
    try:
        names = {"__name__": "__main__"}
        exec(IMPORTS, names)
        exec(_code, names)
    except SystemExit:
        pass
    finally:
        _sys.stdin, _sys.stdout = saved
        _builtins.open = _open
        _signal.setitimer(_signal.ITIMER_PROF, 0)
    written.flush()
    return written.buffer.getvalue().decode("utf-8", "replace")

def _too_slow(*_):
    raise TimeoutError(f"more than {CASE_CPU_S} s of CPU time for one case")

_signal.signal(_signal.SIGPROF, _too_slow)
"""
_COMPARE = """
from decimal import Decimal, InvalidOperation

def same_line(got, expected):
    if got == expected:
        return True
    try:
        return [Decimal(word) for word in got.split()] == [Decimal(word) for word in expected.split()]
    except InvalidOperation:
        return False

def lines_of(text):
    return [line.strip() for line in text.strip().split("\\n")]

for number, (given, expected) in enumerate(CASES):
    got, wanted = lines_of(run_case(given)), lines_of(expected)
    assert len(got) == len(wanted), f"case {number}: {len(got)} lines instead of {len(wanted)}"
    assert all(map(same_line, got, wanted)), f"case {number}: another output"
"""
_CALL = """
import json

for number, (given, expected) in enumerate(CASES):
    got = FUNCTION(*[json.loads(line) for line in given.split("\\n")])
    got = list(got) if isinstance(got, tuple) else got
    assert got == json.loads(expected), f"case {number}: another value"
"""


def load(data: str | None = None) -> Task:
    if data is None:
        todo = "give --data test.jsonl (or test2.jsonl, ...) of LiveCodeBench's release"
        raise UserError("task livecodebench", "needs a file", todo)
    raw = storage.read_bytes(data)
    rows = read_rows(data, raw, KEYS)
    return Task(
        name="livecodebench",
        problems=tuple(_problem(f"{data}: row {number}", row) for number, row in enumerate(rows, start=1)),
        stops=(),
        prompt_form="question, starter code if any, answer in a code block",
        extraction="the last code block",
        data_sha256=hashlib.sha256(raw).hexdigest(),
        build=_program,
        take=last_block,
        limits=LIMITS,
        is_whole=True,
    )


def last_block(text: str) -> str:
    """The program in a model's answer."""
    from lakh.evals.generation.chat import program_of_answer

    return program_of_answer(text, "", "")


def _problem(where: str, row: dict[str, Any]) -> Problem:
    try:
        metadata = json.loads(row["metadata"] or "{}")
        cases = [*_cases(row["public_test_cases"]), *_cases(row["private_test_cases"])]
        pairs = [(str(case["input"]), str(case["output"])) for case in cases]
        name = metadata.get("func_name") or ""
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        binascii.Error,
        zlib.error,
        pickle.UnpicklingError,
    ) as error:
        found = f"has tests or metadata that cannot be read ({type(error).__name__}: {error})"
        raise UserError(where, found, "give --data the benchmark's own file") from None
    if not pairs:
        raise UserError(where, "has no test cases", "give --data the benchmark's own file")
    return Problem(
        id=str(row["question_id"]),
        prompt=_prompt(row["question_content"], row["starter_code"]),
        canonical="",
        test=f"CASES = {pairs!r}\n",
        entry_point=name,
    )


def _cases(text: str) -> list[dict[str, Any]]:
    """Cases as JSON; later releases compress the private ones, as a pickled text."""
    try:
        return list(json.loads(text))
    except ValueError:
        packed = zlib.decompress(base64.b64decode(text.encode(), validate=True))
        return list(json.loads(_PlainUnpickler(io.BytesIO(packed)).load()))


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} instead of a text")


def _prompt(question: str, starter: str) -> str:
    task = (
        f"Write the program by completing this code:\n\n```python\n{starter}\n```\n"
        if starter
        else "Write a Python program that reads the input from stdin and prints the answer to stdout.\n"
    )
    return f"{question}\n\n{task}\nPut the whole program in one code block.\n\n"


def _program(problem: Problem, completion: str) -> Program:
    if not problem.entry_point:
        runner = _RUNNER.replace("CASE_CPU_S", str(CASE_CPU_S))
        source = f"TEXT, IMPORTS = {completion!r}, {_IMPORTS!r}\n{runner}"
        return Program(source, test=problem.test + _COMPARE, names=("run_case",))
    has_class = "class Solution" in completion
    function = f"Solution().{problem.entry_point}" if has_class else problem.entry_point
    return Program(
        source=f"{_IMPORTS}{completion}\n",
        test=f"{problem.test}FUNCTION = {function}\n{_CALL}",
        names=("Solution",) if has_class else (problem.entry_point,),
    )
