"""A task of the user's own, described by a TOML or JSON file: its data, which fields hold what, and how to judge.

    name = "sql-helpers"
    data = "problems.jsonl"        # beside this file, an absolute path or a URL

    [fields]
    prompt = "question"

The rows of the data are those that lakh's own benchmarks may have: JSON lines, a JSON list, gzipped, or Parquet. Python
programs and their tests run in two processes, as those of HumanEval do; those of other languages as in MultiPL-E.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lakh import config, storage
from lakh.errors import ConfigError, UserError
from lakh.evals.data import read_rows
from lakh.evals.sandbox.verdict import SandboxLimits, SandboxVerdict
from lakh.evals.task import CommandProgram, Problem, Program, Task
from lakh.evals.tasks import multilingual, multipl_e
from lakh.evals.tasks.humaneval import STOPS
from lakh.evals.tasks.livecodebench import last_block

__all__ = ["SUFFIXES", "TaskFields", "TaskFile", "load_task_file"]

SUFFIXES = (".toml", ".json")
Build = Callable[[Problem, str], Program | CommandProgram | SandboxVerdict]


@dataclass(frozen=True)
class TaskFields:
    """Names of the data's fields."""

    prompt: str = "prompt"
    """What the model is given."""
    test: str = "test"
    """Source that checks the program, or a list of such sources. Not needed for exact-match."""
    id: str = ""
    """Name of a problem; empty: problems are numbered from 0."""
    solution: str = ""
    """A correct completion, or the expected text of exact-match; empty: there is none. It sets the CPU limit."""
    entry_point: str = ""
    """Name of the function under test; empty: the names that the test uses and does not define."""


@dataclass(frozen=True)
class TaskFile:
    """What a task file may have."""

    name: str
    """Name of the task in results: letters, digits, dots, dashes."""
    data: str = ""
    """File of the problems, relative to the task file; --data replaces it."""
    language: str = "python"
    """python, or a language of MultiPL-E: cpp, go, java, js, lua, php, pl, r, rb, rs, sh, ts, ..."""
    metric: Literal["tests", "exact-match"] = "tests"
    """tests: run the program with its test. exact-match: the completion equals the solution, white space at its ends
    excepted."""
    completion: Literal["continuation", "program"] = "continuation"
    """continuation: the program is prompt and completion. program: the last code block of an answer in words."""
    stops: tuple[str, ...] | None = None
    """Generation ends before the first of these; default: those of HumanEval for Python, otherwise none."""
    fields: TaskFields = field(default_factory=TaskFields)
    """Names of the data's fields."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """Limits of one program; the CPU limit only matters for problems without a solution."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ConfigError("name", f"is {self.name!r}", "use letters, digits, dots and dashes")
        if self.stops is not None and "" in self.stops:
            raise ConfigError("stops", "has an empty text", "remove it")
        known = ("python", *multipl_e.table())
        if self.language not in known:
            raise ConfigError("language", f"{self.language!r} is not supported", f"choose one of: {', '.join(known)}")
        if self.metric == "exact-match" and not self.fields.solution:
            raise ConfigError("fields.solution", "is empty", "name the field with the expected text")


def load_task_file(path: Path, data: str | None) -> Task:
    """Read the description and its data; every mistake is an error that names the file, the row and the field."""
    described = _read(path)
    source = data or (described.data and _beside(path, described.data))
    if not source:
        raise UserError(f"task {path}", "names no data", 'write data = "FILE.jsonl", or give --data FILE')
    raw = storage.read_bytes(source)
    fields = described.fields
    needed = [fields.prompt, fields.solution, fields.id, fields.entry_point]
    needed += [fields.test] if described.metric == "tests" else []
    rows = read_rows(source, raw, [name for name in needed if name])
    problems = [_problem(f"{source}: row {n}", n - 1, row, described) for n, row in enumerate(rows, start=1)]
    seen: set[str] = set()
    for number, problem in enumerate(problems, start=1):
        if problem.id in seen:
            raise UserError(f"{source}: row {number}", f"has the id {problem.id!r} again", "ids have to differ")
        seen.add(problem.id)
    is_python, is_whole = described.language == "python", described.completion == "program"
    stops = described.stops
    if stops is None:
        stops = STOPS if is_python and not is_whole and described.metric == "tests" else ()
    extraction = "the last code block" if is_whole else "cut at the first stop string"
    build: Build = _exact_match if described.metric == "exact-match" else _python if is_python else _command
    return Task(
        name=described.name,
        problems=tuple(problems),
        stops=stops,
        prompt_form=f"field {fields.prompt}",
        extraction=extraction,
        data_sha256=hashlib.sha256(raw).hexdigest(),
        build=_whole(build) if is_whole else build,
        take=last_block if is_whole else None,
        limits=described.limits if is_python else _limits_of_commands(described.limits),
        is_whole=is_whole,
    )


def _read(path: Path) -> TaskFile:
    if path.suffix == ".toml":
        return config.load(TaskFile, path)
    try:
        document = json.loads(storage.read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"is not JSON ({error})", "fix it, or write the task as TOML") from None
    if not isinstance(document, dict):
        raise ConfigError(str(path), "is not a JSON object", 'write {"name": ..., "data": ..., "fields": {...}}')
    return config.from_dict(TaskFile, document, origin=path.name)


def _beside(path: Path, data: str) -> str:
    return storage.join(str(path.parent), data) if storage.is_local(data) and not Path(data).is_absolute() else data


def _limits_of_commands(limits: SandboxLimits) -> SandboxLimits:
    """What compilers and virtual machines need, unless the task file has limits of its own."""
    return multilingual.LIMITS if limits == SandboxLimits() else limits


def _problem(where: str, number: int, row: dict[str, Any], described: TaskFile) -> Problem:
    fields = described.fields
    name = str(row[fields.id]) if fields.id else f"{described.name}/{number}"
    prompt, solution = _text(where, row, fields.prompt), _text(where, row, fields.solution)
    entry_point = _text(where, row, fields.entry_point)
    if described.metric == "exact-match":
        return Problem(name, prompt, solution, "", language=described.language)
    given = row[fields.test]
    if isinstance(given, list) and all(isinstance(part, str) for part in given):
        row = {**row, fields.test: "\n".join(given)}
    test = _text(where, row, fields.test)
    names: tuple[str, ...] = ()
    if described.language == "python":
        test, names = _python_test(where, fields.test, test, entry_point)
    elif not re.search(multipl_e.table()[described.language].closing, test):
        found = f"{fields.test} does not end as tests of {described.language} do"
        todo = f"write it as MultiPL-E does: it has to match {multipl_e.table()[described.language].closing}"
        raise UserError(where, found, todo)
    return Problem(name, prompt, solution, test, entry_point, language=described.language, names=names)


def _text(where: str, row: dict[str, Any], name: str) -> str:
    if not name:
        return ""
    if not isinstance(row[name], str):
        raise UserError(where, f"{name} is a {type(row[name]).__name__}, not a text", "name another field")
    return str(row[name])


def _python_test(where: str, name: str, test: str, entry_point: str) -> tuple[str, tuple[str, ...]]:
    """The test, with a call of check(...) if it only defines it as HumanEval does, and the names it takes."""
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError) as error:
        raise UserError(where, f"{name} is not Python ({error})", "fix the test") from None
    if not tree.body:
        raise UserError(where, f"{name} is empty, so every program would pass", "write a test, or name another field")
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if entry_point:
        if "check" in defined and "check" not in called:
            test += f"\n\ncheck({entry_point})\n"
        return test, (entry_point,)
    if "check" in defined and "check" not in called:
        found = f"{name} defines check and does not call it"
        raise UserError(where, found, "name the field with the function's name: fields.entry_point")
    names = _free_names(tree)
    if not names:
        todo = "let it call the program's functions, or set fields.entry_point"
        raise UserError(where, f"{name} takes nothing from the program", todo)
    return test, names


def _free_names(tree: ast.Module) -> tuple[str, ...]:
    """Names that a test reads and neither defines nor imports, in the order of their first use."""
    read, bound = [], set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                read.append(node.id)
            else:
                bound.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return tuple(name for name in dict.fromkeys(read) if name not in bound)


def _python(problem: Problem, completion: str) -> Program:
    return Program(
        source=f"{problem.prompt}{completion}\n",
        test=problem.test,
        reference=problem.prompt + problem.canonical if problem.canonical else "",
        names=problem.names,
    )


def _command(problem: Problem, completion: str) -> CommandProgram | SandboxVerdict:
    return multilingual.command_program(problem, completion, multipl_e.table())


def _exact_match(problem: Problem, completion: str) -> SandboxVerdict:
    if completion.strip() == problem.canonical.strip():
        return SandboxVerdict("passed")
    return SandboxVerdict("failed", "another text")


def _whole(build: Build) -> Build:
    """A question in words is not a part of the program."""
    return lambda problem, completion: build(replace(problem, prompt=""), completion)
