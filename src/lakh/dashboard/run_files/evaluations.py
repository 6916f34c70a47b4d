"""Evaluations of a run: the folders RUN/evals/... that `lakh eval --out` and `lakh eval watch` write.

    RUN/evals/TASK/result.json          of lakh eval --out RUN/evals/TASK
    RUN/evals/STEP/TASK/result.json     of lakh eval watch

Links are not followed, and sizes are bounded: a run folder may come from somebody else.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lakh import storage
from lakh.dashboard.numbers import counts, finite
from lakh.errors import LakhError

__all__ = ["find_evaluations", "read_samples"]

FOLDER, RESULT = "evals", "result.json"
MAX_EVALUATIONS = 200
MAX_RESULT_BYTES = 16 << 20
MAX_LINES_BYTES = 64 << 20
MAX_SAMPLES = 500
MAX_TEXT_CHARS = 4_000


def find_evaluations(run: Path) -> list[dict[str, Any]]:
    """A summary of each evaluation, by step and task; incomplete and unreadable ones are left out."""
    found = []
    for folder in itertools.islice(_result_folders(run / FOLDER, depth=2), MAX_EVALUATIONS):
        summary = _summary(folder, folder.relative_to(run / FOLDER).as_posix())
        if summary is not None:
            found.append(summary)
    return sorted(found, key=lambda item: (item["step"] is None, item["step"] or 0, item["id"]))


def read_samples(run: Path, evaluation: str) -> list[dict[str, Any]] | None:
    """The samples of an evaluation with their verdicts; None if the run has no such evaluation."""
    if all(item["id"] != evaluation for item in find_evaluations(run)):
        return None
    folder = run / FOLDER / evaluation
    empty: dict[str, Any] = {}
    rows = itertools.zip_longest(_lines(folder / "samples.jsonl"), _lines(folder / "verdicts.jsonl"), fillvalue=empty)
    return [
        {
            "task_id": _text(sample.get("task_id") or verdict.get("task_id")),
            "text": _text(sample.get("completion") or sample.get("solution")),
            "kind": _text(verdict.get("kind")),
            "detail": _text(verdict.get("detail")),
        }
        for sample, verdict in itertools.islice(rows, MAX_SAMPLES)
    ]


def _result_folders(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError:  # none yet, or no permission
        return
    for name, is_folder in found:
        if is_folder and _is_file(folder / name / RESULT):
            yield folder / name
        elif is_folder and depth > 1:
            yield from _result_folders(folder / name, depth - 1)


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _summary(folder: Path, name: str) -> dict[str, Any] | None:
    result = _json(_bytes(folder / RESULT, MAX_RESULT_BYTES))
    passed, total = result.get("passed"), result.get("total")
    if not (isinstance(passed, int) and isinstance(total, int) and isinstance(result.get("task"), str)):
        return None  # bits per byte, or not ours
    interval = result.get("interval")
    low, high = map(finite, interval) if isinstance(interval, list) and len(interval) == 2 else (None, None)
    scores, kinds = result.get("pass_at_k"), result.get("kinds")
    step = name.partition("/")[0]
    return {
        "id": name,
        "task": _text(result["task"]),
        "step": int(step) if step.isdecimal() else None,
        "passed": passed,
        "total": total,
        "pass_at_1": finite(scores.get("1")) if isinstance(scores, dict) else None,
        "low": low,
        "high": high,
        "kinds": counts(kinds),
        "sandbox": _text(result.get("sandbox")),
        "protocol": _text(result.get("protocol")),
    }


def _bytes(path: Path, most: int) -> bytes:
    try:
        if not _is_file(path) or path.stat().st_size > most:
            return b""
        return storage.read_bytes(path)
    except (OSError, LakhError):
        return b""


def _json(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """One document per line; an unreadable line is an empty one, so that samples and verdicts stay aligned."""
    for line in _bytes(path, MAX_LINES_BYTES).splitlines():
        yield _json(line)


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + " ..."
