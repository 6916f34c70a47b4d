"""The benchmarks by name. A task is one small file with a function `load(data) -> Task` and a line in TASKS, or a file
of the user's: a description (task_file.py), or Python with that function.
"""

from __future__ import annotations

import difflib
import functools
import runpy
from collections.abc import Callable, Iterable
from pathlib import Path

from lakh.errors import UserError
from lakh.evals.task import Task
from lakh.evals.tasks import (
    bigcodebench,
    cruxeval,
    humaneval,
    humaneval_plus,
    infilling,
    lines,
    livecodebench,
    mbpp,
    mbpp_plus,
    multilingual,
    multipl_e,
)
from lakh.evals.tasks.task_file import SUFFIXES, load_task_file

__all__ = ["TASKS", "load_task"]

Loader = Callable[[str | None], Task]


def _variants(load: Callable[..., Task], names: Iterable[str]) -> dict[str, Loader]:
    return {name: functools.partial(load, name=name) for name in names}


TASKS: dict[str, Loader] = {
    "humaneval": humaneval.load,
    **_variants(humaneval_plus.load, humaneval_plus.FILES),
    **_variants(mbpp.load, mbpp.FILES),
    "mbpp-plus": mbpp_plus.load,
    **_variants(infilling.load, infilling.FILES),
    **_variants(cruxeval.load, cruxeval.NAMES),
    **_variants(multilingual.load, multilingual.FILES),
    "mbxp": multilingual.load_any,
    "multipl-e": multipl_e.load,
    "livecodebench": livecodebench.load,
    **_variants(bigcodebench.load, bigcodebench.NAMES),
    "functions": humaneval.load_own,
    "line-completion": lines.load,
}


def load_task(name: str, data: str | None = None) -> Task:
    """Read a benchmark from its package, its cached download, or the file or folder `data`.

    A name that ends in .toml or .json is the description of a task of the user's, one that ends in .py a file with a
    function `load(data) -> Task`.
    """
    if name.endswith(SUFFIXES):
        task = load_task_file(Path(name), data)
        if task.name in TASKS:
            raise UserError(f"task {name}", f"has the name of lakh's own task {task.name}", "choose another name")
        return task
    if name.endswith(".py"):
        return _load_from_file(Path(name), data)
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        todo = f"did you mean {near[0]}?" if near else f"choose one of: {', '.join(TASKS)}"
        raise UserError(f"task {name!r}", "no such task", todo)
    return TASKS[name](data)


def _load_from_file(path: Path, data: str | None) -> Task:
    todo = "give a Python file with a function load(data) that returns a lakh.evals.task.Task"
    if not path.is_file():
        raise UserError(f"task {path}", "no such file", todo)
    try:
        names = runpy.run_path(str(path))
        task = names["load"](data)
    except KeyError:
        raise UserError(f"task {path}", "has no function load", todo) from None
    except UserError:
        raise
    except Exception as error:  # whatever a user's file may raise
        raise UserError(f"task {path}", f"raises {type(error).__name__}: {error}", todo) from error
    if not isinstance(task, Task):
        raise UserError(f"task {path}", f"load returns a {type(task).__name__}", todo)
    return task
