"""A task: problems to solve in code, and how a completion becomes a program that the sandbox can run.

A benchmark's own file in tasks/ reads the data and fills this in. Independent of models and of how programs run.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lakh.errors import UserError
from lakh.evals.sandbox.program import NONCE, CommandProgram, Program
from lakh.evals.sandbox.verdict import SandboxLimits, SandboxVerdict

__all__ = ["NONCE", "CommandProgram", "Problem", "Program", "Task", "cut_at_stops", "names_under_test", "problems_from"]


@dataclass(frozen=True, slots=True)
class Problem:
    id: str
    prompt: str
    """What the model is given."""
    canonical: str
    """The benchmark's own completion; empty if it has none."""
    test: str
    """Source of the checks; the task's `build` adds the call."""
    entry_point: str = ""
    """Name of the function under test, if there is one."""
    suffix: str = ""
    """What follows the completion, for infilling; other tasks may use it as they like."""
    language: str = "python"
    names: tuple[str, ...] = ()
    """Names that the test takes from the candidate, if more than the entry point."""


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    problems: tuple[Problem, ...]
    stops: tuple[str, ...]
    """Generation ends before the first of these."""
    data_sha256: str
    build: Callable[[Problem, str], Program | CommandProgram | SandboxVerdict]
    """Problem and completion -> the program to run, or a verdict if nothing has to run."""
    prompt_form: str = "raw prompt"
    """How the model sees a problem, in a few words for the protocol line."""
    extraction: str = "cut at the first stop string"
    """How a completion is taken from the generated text, likewise."""
    take: Callable[[str], str] | None = None
    """Generated text -> completion; by default the text before the first stop string."""
    ended: Callable[[str], bool] | None = None
    """Whether `take` would ignore any further text, so that generation may stop."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    is_whole: bool = False
    """The completion is the whole program, not the rest of the prompt."""
    is_infilling: bool = False
    """The completion goes between prompt and suffix."""

    def extract(self, text: str) -> str:
        return self.take(text) if self.take else cut_at_stops(text, self.stops)

    def first(self, limit: int | None) -> Task:
        """The task with its first `limit` problems only."""
        if limit is None:
            return self
        if limit < 1:
            raise UserError(f"--limit {limit}", "leaves no problem", "choose 1 or more")
        return replace(self, problems=self.problems[:limit])


def problems_from(rows: Iterable[Mapping[str, Any]]) -> tuple[Problem, ...]:
    """Problems from rows with the keys of HumanEval, which many benchmarks share."""
    return tuple(
        Problem(
            id=row["task_id"],
            prompt=row["prompt"],
            canonical=row.get("canonical_solution") or "",
            test=row["test"],
            entry_point=row["entry_point"],
            suffix=row.get("suffix", ""),
            language=row.get("language", "python"),
        )
        for row in rows
    )


def cut_at_stops(text: str, stops: tuple[str, ...]) -> str:
    """The text before the earliest stop string, whether or not the engine included that string."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def names_under_test(reference: str, test: str) -> tuple[str, ...]:
    """Functions and classes that the reference defines and the test uses: what the test takes from the candidate.

    Only these: a candidate that redefines abs or len changes nothing for the test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old data has escapes that Python now warns about
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        defined = [node.name for node in ast.parse(reference).body if isinstance(node, kinds)]
        used = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    return tuple(name for name in dict.fromkeys(defined) if name in used)
