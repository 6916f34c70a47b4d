"""The benchmarks by name. A task is one small file with a function `load(data) -> Task`."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from lakh.errors import UserError
from lakh.evals.task import Task
from lakh.evals.tasks import humaneval

__all__ = ["TASKS", "load_task"]

TASKS: dict[str, Callable[[str | None], Task]] = {
    "humaneval": humaneval.load,
}


def load_task(name: str, data: str | None = None) -> Task:
    """Read a benchmark from its package, or from the file or folder `data`."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        todo = f"did you mean {near[0]}?" if near else f"choose one of: {', '.join(TASKS)}"
        raise UserError(f"task {name!r}", "no such task", todo)
    return TASKS[name](data)
