"""The benchmarks by name. A task is one small file with a function `load(data) -> Task` and a line in TASKS."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable

from lakh.errors import UserError
from lakh.evals.task import Task
from lakh.evals.tasks import cruxeval, humaneval, humaneval_plus, infilling, lines, mbpp, multilingual

__all__ = ["TASKS", "load_task"]

TASKS: dict[str, Callable[[str | None], Task]] = {
    "humaneval": humaneval.load,
    "humaneval-plus": humaneval_plus.load,
    "humaneval-plus-mini": humaneval_plus.load_mini,
    "mbpp": mbpp.load,
    "mbpp-test": mbpp.load_test,
    "mbpp-sanitized": mbpp.load_sanitized,
    "infilling": infilling.load,
    "infilling-multi-line": infilling.load_multi_line,
    "infilling-random-span": infilling.load_random_span,
    "infilling-random-span-light": infilling.load_random_span_light,
    "cruxeval": cruxeval.load,
    "cruxeval-output": cruxeval.load_output,
    "cruxeval-input": cruxeval.load_input,
    **{name: functools.partial(multilingual.load, name=name) for name in multilingual.FILES},
    "mbxp": multilingual.load_any,
    "line-completion": lines.load,
}


def load_task(name: str, data: str | None = None) -> Task:
    """Read a benchmark from its package, its cached download, or the file or folder `data`."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        todo = f"did you mean {near[0]}?" if near else f"choose one of: {', '.join(TASKS)}"
        raise UserError(f"task {name!r}", "no such task", todo)
    return TASKS[name](data)
