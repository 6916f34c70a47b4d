"""A task: problems to be solved in code, and how a completion becomes a program that proves itself.

Knows nothing of models, sandboxes or files: a benchmark's own file under tasks/ reads the data and fills this in.

A Python program is two texts that run in two processes: the candidate's, and ours, which asks it (inside/examiner.py).
They are compiled apart, so that nothing a model writes (an open quote, a trailing backslash) can swallow the test. A
program of another language is files and commands.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lakh.errors import UserError
from lakh.evals.sandbox.verdict import SandboxLimits, SandboxVerdict

__all__ = ["NONCE", "Commands", "Problem", "Program", "Task", "cut_at_stops", "names_under_test"]

NONCE = "THE_NONCE_GOES_HERE"


@dataclass(frozen=True, slots=True)
class Program:
    """What the sandbox runs. Passed means that both texts ran to their end."""

    source: str
    """The candidate's text."""
    test: str
    """Ours, which calls the names under test."""
    reference: str = ""
    """Trusted text that runs before the test, beside it: its helpers and imports."""
    names: tuple[str, ...] = ()
    """What the test asks the candidate for, instead of taking it from the reference."""


@dataclass(frozen=True, slots=True)
class CommandProgram:
    """A program of another language. Passed means that all commands end with 0, and the last prints the nonce last."""

    files: dict[str, str]
    commands: tuple[tuple[str, ...], ...]
    environment: dict[str, str] = field(default_factory=dict)
    nonce_mark: str = NONCE
    """Stands in the files where the nonce goes."""


@dataclass(frozen=True, slots=True)
class Problem:
    id: str
    prompt: str
    """What the model is given."""
    canonical: str
    """The completion that the benchmark itself gives."""
    test: str
    """Text that defines or holds the checks; how it is called is the task's `build`."""
    entry_point: str = ""
    """Name of the function under test, where there is one."""
    suffix: str = ""
    """What follows the hole, for infilling; otherwise the task's own business."""
    language: str = "python"
    names: tuple[str, ...] = ()
    """What the test asks the candidate for, where it is more than the entry point."""


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    problems: tuple[Problem, ...]
    stops: tuple[str, ...]
    """Generation ends before the first of these."""
    prompt_form: str
    """How the model sees a problem, in a few words for the protocol line."""
    extraction: str
    """How a completion is taken out of what the model wrote, likewise."""
    data_sha256: str
    build: Callable[[Problem, str], Program | CommandProgram | SandboxVerdict]
    """Problem and completion -> the program to run, or a verdict that needs no running."""
    take: Callable[[str], str] | None = None
    """What a model wrote -> the completion; by default what stands before the first stop string."""

    ended: Callable[[str], bool] | None = None
    """Whether a model has written all that `take` would look at, so that it may stop."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    is_infilling: bool = False
    """A problem is a hole between prompt and suffix."""

    def extract(self, text: str) -> str:
        return self.take(text) if self.take else cut_at_stops(text, self.stops)

    def first(self, limit: int | None) -> Task:
        """The task with its first `limit` problems only."""
        if limit is None:
            return self
        if limit < 1:
            raise UserError(f"--limit {limit}", "leaves no problem", "choose 1 or more")
        return replace(self, problems=self.problems[:limit])


def cut_at_stops(text: str, stops: tuple[str, ...]) -> str:
    """The text before the earliest stop string, whether or not the engine left that string in."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def names_under_test(reference: str, test: str) -> tuple[str, ...]:
    """Functions and classes that the reference defines and the test uses: what the candidate is asked for.

    Only these: a candidate that redefines abs or len changes nothing for the test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old data has escapes that Python has come to dislike
        defined = [
            node.name
            for node in ast.parse(reference).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
        used = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    return tuple(name for name in dict.fromkeys(defined) if name in used)
