"""A task: problems to be solved in code, and how a completion becomes a program that proves itself.

Knows nothing of models, sandboxes or files: a benchmark's own file under tasks/ reads the data and fills this in.

A program has two texts that run in one namespace, one after the other. They are compiled apart, so that nothing a model
writes (an open quote, a trailing backslash) can swallow the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lakh.errors import UserError

__all__ = ["Problem", "Program", "Task", "cut_at_stops"]


@dataclass(frozen=True, slots=True)
class Program:
    """What the sandbox runs: the candidate's text, then ours. Passed means that both ran to their end."""

    source: str
    test: str


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
    """What follows the hole, for infilling."""


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
    build: Callable[[Problem, str], Program]
    """Problem and completion -> the program to run."""

    def program(self, problem: Problem, completion: str) -> Program:
        return self.build(problem, completion)

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
