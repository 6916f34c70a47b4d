"""Tasks of the cross-file benchmark: lines of a package that use a name which another file of the package defines.

The line is cut before the first such name; the rest of the line is the answer. Imports are read with Python's own
parser and are not resolved here, so that a task says nothing about what retrieval will find. One task per file.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["CrossFileTask", "tasks_of"]

MIN_LINES_BEFORE = 12
MIN_ANSWER_CHARS, MAX_ANSWER_CHARS = 8, 100
MAX_FILE_CHARS = 200_000


class CrossFileTask(NamedTuple):
    package: str
    root: Path
    """The folder that holds the package."""
    file: Path
    before: str
    answer: str
    """The rest of the line, without its end."""
    name: str


def tasks_of(folder: Path, count: int, seed: int) -> list[CrossFileTask]:
    """At most `count` tasks, as evenly as possible from the packages below a folder: subfolders with an __init__.py or
    with Python packages inside."""
    queues = []
    for root in sorted(path for path in folder.iterdir() if path.is_dir()):
        found = list(_of_package(root, random.Random(f"{seed} {root.name}")))
        random.Random(f"{seed} order {root.name}").shuffle(found)
        if found:
            queues.append(found)
    chosen: list[CrossFileTask] = []
    while queues and len(chosen) < count:
        for queue in list(queues):
            if len(chosen) < count:
                chosen.append(queue.pop())
            if not queue:
                queues.remove(queue)
    return chosen


def _of_package(root: Path, rng: random.Random) -> Iterator[CrossFileTask]:
    for file in sorted(root.rglob("*.py")):
        if "test" in file.name or file.name == "__init__.py":
            continue
        try:
            text = file.read_text(encoding="utf-8")
            tree = ast.parse(text) if len(text) <= MAX_FILE_CHARS else None
        except (OSError, ValueError, SyntaxError):
            continue
        if tree is not None and (places := _places(tree, text, file.relative_to(root).parts[0])):
            line, column, name = rng.choice(places)
            lines = text.split("\n")
            before = "\n".join([*lines[: line - 1], lines[line - 1][:column]])
            yield CrossFileTask(root.name, root, file, before, lines[line - 1][column:].rstrip(), name)


def _places(tree: ast.Module, text: str, package: str) -> list[tuple[int, int, str]]:
    """Line, column and name of the first use of an imported name on each line that can be a task."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == package):
            imported |= {alias.asname or alias.name for alias in node.names}
    lines = text.split("\n")
    first: dict[int, tuple[int, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in imported and lines[node.lineno - 1].isascii():
            first[node.lineno] = min(first.get(node.lineno, (node.col_offset, node.id)), (node.col_offset, node.id))
    places = []
    for line, (column, name) in sorted(first.items()):
        answer = lines[line - 1][column:].rstrip()
        more = len(answer) - len(name)
        if line > MIN_LINES_BEFORE and more >= MIN_ANSWER_CHARS and len(answer) <= MAX_ANSWER_CHARS:
            places.append((line, column, name))
    return places
