"""BigCodeBench: functions that use many libraries, with a unittest each (arXiv 2406.15877; data Apache-2.0).

    bigcodebench            complete a function from its docstring
    bigcodebench-instruct   write the program from an instruction

--data names a file of the release, JSON lines or Parquet; its sha256 in the result identifies it. A row names the
libraries that its solution needs, and its test imports others: without all of these in --packages it is not run. Its
tests look at figures, patch functions and share files with the code under test, so both run in one process, as the
benchmark defines. A program that passes is run again with changed tests that it has to fail (control_tests.py).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

from lakh import storage
from lakh.errors import UserError
from lakh.evals.data import read_rows
from lakh.evals.sandbox import isolation
from lakh.evals.sandbox.verdict import SandboxLimits
from lakh.evals.task import NONCE, CommandProgram, Problem, Task
from lakh.evals.tasks.control_tests import failing_unittests, parts_of_unittest
from lakh.evals.tasks.livecodebench import last_block

__all__ = ["KEYS", "NAMES", "load"]

NAMES = ("bigcodebench", "bigcodebench-instruct")
KEYS = ("task_id", "complete_prompt", "instruct_prompt", "canonical_solution", "code_prompt", "test", "entry_point",
        "libs")  # fmt: skip
# The tests of 195 and 1104 sleep for 45 and 73 s.
LIMITS = SandboxLimits(cpu_s=60, wall_s=600, idle_s=90, memory_MiB=4096, file_MiB=64, tmp_MiB=256, processes=64)
STOPS = ("\nclass ", "\nif __name__", "\nprint(", "\n```")
ENVIRONMENT = {"MPLBACKEND": "Agg", "MPLCONFIGDIR": "/tmp"}

# Solution and test are compiled apart: an open quote in the one cannot absorb the other.
_MAIN = f"""
import sys, types, unittest
module = sys.modules["__test__"] = types.ModuleType("__test__")
for name in ("solution.py", "tests.py"):
    with open(name, encoding="utf-8", errors="surrogatepass") as file:
        text = file.read()
    exec(compile(text, name, "exec", dont_inherit=True), vars(module))
result = unittest.TestResult()
unittest.TestLoader().loadTestsFromTestCase(module.TestCases).run(result)
for test, trace in result.failures + result.errors:
    print(test.id().rpartition(".")[2], "Error", trace.strip().splitlines()[-1])
if result.failures or result.errors or not result.testsRun:
    sys.exit(1)
print("\\n{NONCE}")
"""


def load(data: str | None = None, *, name: str = "bigcodebench") -> Task:
    if data is None:
        raise UserError(f"task {name}", "needs a file", "give --data the dataset's own file, JSON lines or Parquet")
    raw = storage.read_bytes(data)
    is_instruct = name == "bigcodebench-instruct"
    rows = read_rows(data, raw, KEYS)
    return Task(
        name=name,
        problems=tuple(_problem(f"{data}: row {number}", row, is_instruct) for number, row in enumerate(rows, start=1)),
        stops=() if is_instruct else STOPS,
        prompt_form="instruction" if is_instruct else "docstring",
        extraction="the last code block" if is_instruct else "cut at the first stop string",
        data_sha256=hashlib.sha256(raw).hexdigest(),
        build=_program,
        take=last_block if is_instruct else None,
        limits=LIMITS,
        is_whole=is_instruct,
    )


def _problem(where: str, row: dict[str, Any], is_instruct: bool) -> Problem:
    try:
        libraries = row["libs"] if isinstance(row["libs"], list) else ast.literal_eval(row["libs"] or "[]")
        test = ast.parse(row["test"])
    except (ValueError, SyntaxError, TypeError) as error:
        found = f"has libs or a test that cannot be read ({error})"
        raise UserError(where, found, "give --data the benchmark's own file") from None
    solution = row["code_prompt"] + row["canonical_solution"]
    return Problem(
        id=row["task_id"],
        prompt=row["instruct_prompt"] if is_instruct else row["complete_prompt"],
        canonical=solution if is_instruct else row["canonical_solution"],
        test=row["test"],
        entry_point=row["entry_point"],
        suffix="" if is_instruct else row["complete_prompt"],
        names=tuple(dict.fromkeys([*map(str, libraries), *_imports(test)])),
    )


def _imports(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return found


def _program(problem: Problem, completion: str) -> CommandProgram:
    def files(test: str) -> dict[str, str]:
        return {"main.py": _MAIN, "solution.py": f"{before}{completion}\n", "tests.py": test}

    before = problem.suffix if problem.prompt else ""  # a whole program comes without its prompt
    test = ast.unparse(ast.parse(problem.test))  # as the changed tests are written, which it must resemble
    interpreter = isolation.interpreter()
    path = f"{Path(interpreter).parent}:{isolation.ENVIRONMENT['PATH']}"  # some programs start `python`
    return CommandProgram(
        files(test),
        ((interpreter, *isolation.PYTHON_FLAGS, "main.py"),),
        isolation.ENVIRONMENT | ENVIRONMENT | {"PATH": path},
        controls=tuple(files(changed) for changed in failing_unittests(problem.test)),
        parts=tuple(files(part) for part in parts_of_unittest(problem.test)),
        packages=tuple(sorted({_package(library) for library in problem.names} - {""})),
    )


@functools.cache
def _package(library: str) -> str:
    """The package that has a module; empty for the standard library."""
    module = library.partition(".")[0]
    if module in sys.stdlib_module_names:
        return ""
    found = _packages().get(module, [module])[0]
    return re.sub(r"[-_.]+", "-", found).lower()


@functools.cache
def _packages() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())
