"""The benchmarks by name. A task is one small file with a function `load(data) -> Task` and a line in TASKS."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable

from lakh.errors import UserError
from lakh.evals.task import Task
from lakh.evals.tasks import cruxeval, humaneval, humaneval_plus, infilling, lines, mbpp, multilingual

__all__ = ["TASKS", "load_task"]

Loader = Callable[[str | None], Task]


def _variants(load: Callable[..., Task], names: Iterable[str]) -> dict[str, Loader]:
    return {name: functools.partial(load, name=name) for name in names}


TASKS: dict[str, Loader] = {
    "humaneval": humaneval.load,
    **_variants(humaneval_plus.load, humaneval_plus.FILES),
    **_variants(mbpp.load, mbpp.FILES),
    **_variants(infilling.load, infilling.FILES),
    **_variants(cruxeval.load, cruxeval.NAMES),
    **_variants(multilingual.load, multilingual.FILES),
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
