"""MultiPL-E: HumanEval and MBPP translated to other languages, in the form of its release (arXiv 2208.08227).

--data names a file of the release (humaneval-js-reworded.jsonl, a Parquet file of the dataset, ...); its sha256 in the
result identifies it. A program is prompt, completion and tests, and runs if the language's tools are in /usr/bin;
otherwise its verdict is "not_run" with the missing tool's name. How each language runs is in multipl_e.toml. Rows in
Python run in two processes, as those of HumanEval do.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from lakh import storage
from lakh.errors import UserError
from lakh.evals.data import read_rows
from lakh.evals.sandbox.verdict import SandboxVerdict
from lakh.evals.task import CommandProgram, Problem, Program, Task
from lakh.evals.tasks.multilingual import LIMITS, Language, command_program, languages

__all__ = ["KEYS", "load", "table"]

KEYS = ("name", "language", "prompt", "tests", "stop_tokens")
_OTHER_NAMES = {"go_test.go": "go", "javascript": "js", "typescript": "ts", "python": "py", "ruby": "rb", "rust": "rs",
                "perl": "pl", "racket": "rkt", "julia": "jl", "csharp": "cs", "bash": "sh"}  # fmt: skip


def table() -> dict[str, Language]:
    return languages("multipl_e.toml")


def load(data: str | None = None) -> Task:
    if data is None:
        todo = "give --data a file of MultiPL-E, e.g. humaneval-js-reworded.jsonl"
        raise UserError("task multipl-e", "needs a file", todo)
    raw = storage.read_bytes(data)
    rows = read_rows(data, raw, KEYS)
    found = {str(row["language"]) for row in rows}
    unknown = sorted(name for name in found if name != "py" and _language(name) not in ("py", *table()))
    if unknown:
        known = ", ".join(["py", *table()])
        raise UserError(data, f"language {unknown[0]} is not supported", f"choose one of: {known}")
    if len(found) > 1:
        raise UserError(data, f"has several languages ({', '.join(sorted(found))})", "give one file for each")
    return Task(
        name="multipl-e",
        problems=tuple(_problem(row) for row in rows),
        stops=tuple(rows[0]["stop_tokens"]),
        prompt_form=f"raw prompt in {_language(found.pop())}",
        data_sha256=hashlib.sha256(raw).hexdigest(),
        build=_program,
        limits=LIMITS,
    )


def _problem(row: dict[str, Any]) -> Problem:
    return Problem(
        id=row["name"],
        prompt=row["prompt"],
        canonical=row.get("canonical_solution") or "",
        test=row["tests"],
        entry_point=row["name"].split("_", 2)[-1] if row["name"].count("_") > 1 else "",
        language=_language(row["language"]),
    )


@functools.cache
def _language(name: str) -> str:
    return _OTHER_NAMES.get(name, name)


def _program(problem: Problem, completion: str) -> Program | CommandProgram | SandboxVerdict:
    if problem.language == "py":
        return Program(f"{problem.prompt}{completion}\n", test=problem.test, names=(problem.entry_point,))
    return command_program(problem, completion, table())
