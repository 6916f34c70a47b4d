"""Completions on disk: one JSON object per line, {"task_id": ..., "completion": ...}, the form of openai/human-eval.

EvalPlus has {"task_id": ..., "solution": ...} with the whole program. Both forms are read and written, and `.gz` files
are unpacked. Several lines with one task id are several samples. Unknown keys are ignored, because other tools add
their own; every other mistake is an error that names its line.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lakh import storage
from lakh.errors import UserError
from lakh.evals.sandbox.verdict import SandboxVerdict
from lakh.evals.task import CommandProgram, Problem, Program, Task

__all__ = [
    "CANONICAL",
    "Sample",
    "canonical_samples",
    "export_whole",
    "fingerprint",
    "program_of",
    "read_samples",
    "write_samples",
]

CANONICAL = "canonical solutions"  # in a protocol, instead of a samples file


@dataclass(frozen=True, slots=True)
class Sample:
    task_id: str
    completion: str
    whole: bool = False
    """The completion is the whole program, prompt included."""


def program_of(task: Task, problem: Problem, sample: Sample) -> Program | CommandProgram | SandboxVerdict:
    if not sample.whole or task.is_whole:
        return task.build(problem, sample.completion)
    built = task.build(problem, "")
    if isinstance(built, Program):
        return replace(built, source=sample.completion + "\n")
    return task.build(replace(problem, prompt=""), sample.completion)


def read_samples(path: str, task: Task, *, partial: bool = False, n: int | None = None) -> list[Sample]:
    """The samples of a file, in the order of the task's problems: the same number of each problem, or `n`.

    `partial` allows problems without a sample and different numbers of samples.
    """
    known = {problem.id: index for index, problem in enumerate(task.problems)}
    samples = [_read_line(f"{path}:{number}", line, known) for number, line in _lines(path) if line.strip()]
    if not samples:
        raise UserError(path, "holds no samples", 'write one {"task_id": ..., "completion": ...} per line')
    missing = sorted(known.keys() - {sample.task_id for sample in samples}, key=known.__getitem__)
    if missing and not partial:
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        found = f"has no sample for {len(missing)} of {len(known)} problems ({names})"
        raise UserError(path, found, "add them, or score what is there with --partial")
    counts = Counter(sample.task_id for sample in samples)
    first = next(iter(counts))
    for task_id, count in counts.items():
        if n is not None and count != n:
            found = f"has {count} samples of {task_id} and --n says {n}"
            raise UserError(path, found, "remove duplicate lines, or change --n")
        if not partial and count != counts[first]:
            found = f"has {count} samples of {task_id} and {counts[first]} of {first}"
            raise UserError(path, found, "remove duplicate lines, or score what is there with --partial")
    return sorted(samples, key=lambda sample: known[sample.task_id])


def export_whole(path: str, task: Task, out: str, *, partial: bool = False) -> int:
    """Write the samples of a file as whole programs, in the form of EvalPlus. Returns their number."""
    problems = {problem.id: problem for problem in task.problems}
    written = []
    for sample in read_samples(path, task, partial=partial):
        built = program_of(task, problems[sample.task_id], sample)
        if not isinstance(built, Program):
            raise UserError(f"task {task.name}", "has no whole programs in Python", "export another task")
        written.append(Sample(sample.task_id, built.source, whole=True))
    write_samples(out, written)
    return len(written)


def write_samples(path: str, samples: Iterable[Sample]) -> None:
    storage.write_bytes(path, _bytes(samples))


def fingerprint(samples: Iterable[Sample]) -> str:
    """SHA-256 of the samples as `write_samples` writes them."""
    return hashlib.sha256(_bytes(samples)).hexdigest()


def canonical_samples(task: Task) -> list[Sample]:
    """The benchmark's own solutions; a correct harness passes them all. Some benchmarks lack some."""
    return [Sample(problem.id, problem.canonical) for problem in task.problems if problem.canonical]


def _bytes(samples: Iterable[Sample]) -> bytes:
    key = {False: "completion", True: "solution"}
    rows = ({"task_id": sample.task_id, key[sample.whole]: sample.completion} for sample in samples)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _lines(path: str) -> list[tuple[int, bytes]]:
    if storage.is_local(path) and storage.local_path(path).is_dir():
        raise UserError(path, "is a folder", "give the samples file in it")
    raw = storage.read_bytes(path)
    if path.endswith(".gz"):
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(path, f"cannot be unpacked ({error})", "give a whole gzip file") from None
    return list(enumerate(raw.splitlines(), start=1))


def _read_line(where: str, line: bytes, known: dict[str, int]) -> Sample:
    todo = 'write it as {"task_id": ..., "completion": ...}'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(where, "is not JSON", todo) from None
    if not isinstance(row, dict):
        raise UserError(where, "is not a JSON object", todo)
    text = "solution" if "solution" in row and "completion" not in row else "completion"
    for key in ("task_id", text):
        if key not in row:
            raise UserError(where, f"has no {key}", todo)
        if not isinstance(row[key], str):
            raise UserError(where, f"{key} is not a string", todo)
    if row["task_id"] not in known:
        example = next(iter(known))
        raise UserError(where, f"{row['task_id']!r} is not a problem of this task", f"ids look like {example!r}")
    return Sample(row["task_id"], row[text], whole=text == "solution")
