"""Exact-match line completion: the model gets everything before a line of a source file and has to write that line.

The data is yours: a folder of source files (or one file) that the model has not seen. A hash of each file selects the
lines, so the same folder gives the same problems everywhere. Correct means equal except for trailing spaces.
"""

from __future__ import annotations

import hashlib
import random

from lakh import storage
from lakh.errors import UserError
from lakh.evals.sandbox.verdict import SandboxVerdict
from lakh.evals.task import Problem, Task

__all__ = ["load", "source_texts"]

LINES_PER_FILE = 4
MIN_CHARS = 8
CONTEXT_CHARS = 8000
LARGEST_FILE_BYTES = 1 << 20
SUFFIXES = (".py", ".js", ".ts", ".java", ".go", ".rs", ".c", ".h", ".cc", ".cpp", ".hpp")
COMMENTS = ("#", "//", "/*", "*", '"""', "'''")


def source_texts(data: str | None, task: str) -> list[tuple[str, str]]:
    """(path, text) of the source files in a folder, sorted; UserError if there are none."""
    if data is None:
        raise UserError(f"task {task}", "needs code that the model has not seen", "give --data FOLDER")
    base = storage.local_path(data)
    if not base.exists():
        raise UserError(data, "no such file or folder", "check the path")
    paths = [base] if base.is_file() else sorted(path for path in base.rglob("*") if path.suffix in SUFFIXES)
    texts = []
    for path in paths:
        if path.is_file() and path.stat().st_size <= LARGEST_FILE_BYTES:
            name = path.name if path == base else str(path.relative_to(base))
            try:
                text = storage.read_bytes(path).decode().replace("\r\n", "\n")
            except UnicodeDecodeError:
                continue
            if text.strip():
                texts.append((name.encode("utf-8", "backslashreplace").decode(), text))  # a name may not be valid text
    if not texts:
        raise UserError(data, "holds no source files", f"names end in {', '.join(SUFFIXES)}")
    return texts


def load(data: str | None = None) -> Task:
    problems = []
    digest = hashlib.sha256()
    for name, text in source_texts(data, "line-completion"):
        digest.update(f"{name}\0{text}\0".encode())
        problems += _problems(name, text)
    if not problems:
        raise UserError(str(data), "holds no line to complete", "give longer files")
    return Task(
        name="line-completion",
        problems=tuple(problems),
        stops=("\n",),
        prompt_form=f"up to {CONTEXT_CHARS} characters before the line, its indentation included",
        extraction="the first line",
        data_sha256=digest.hexdigest(),
        build=_verdict,
    )


def _problems(name: str, text: str) -> list[Problem]:
    lines = text.split("\n")
    stripped = [line.strip() for line in lines]
    usable = [n for n, s in enumerate(stripped) if n >= 3 and len(s) >= MIN_CHARS and not s.startswith(COMMENTS)]
    chosen = random.Random(hashlib.sha256(text.encode()).digest()).sample(usable, min(LINES_PER_FILE, len(usable)))
    problems = []
    for number in sorted(chosen):
        indentation = lines[number].partition(stripped[number])[0]
        before = "\n".join([*lines[:number], indentation])
        problems.append(Problem(f"{name}:{number + 1}", before[-CONTEXT_CHARS:], stripped[number], ""))
    return problems


def _verdict(problem: Problem, completion: str) -> SandboxVerdict:
    if completion.split("\n")[0].rstrip() == problem.canonical.rstrip():
        return SandboxVerdict("passed")
    return SandboxVerdict("failed", "another line")
