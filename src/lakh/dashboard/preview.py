"""A first look at a long run: a few thousand lines of its event file, evenly spaced, its extreme steps, and its end.

Reading millions of events takes a while. Until that is done, the page shows the whole run by these lines, and says so.
The extreme steps (lakh.events.extremes) hold the minimum and the maximum of every curve in every few hundred steps;
runs of earlier versions have no such file.
"""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lakh.dashboard.records import MAX_TIME_S
from lakh.dashboard.table import StepTable
from lakh.events import Record, current_kind
from lakh.events.extremes import EXTREMES
from lakh.events.log import FOLDER

__all__ = ["RunPreview", "preview_run"]

MIN_BYTES = 32 << 20
"""Smaller files are read at once."""
LINES = 3_000
MAX_LINE_BYTES = 1 << 16
TAIL_BYTES = 1 << 18
"""More than the steps since the last block of extreme ones."""
MAX_EXTREMES_BYTES = 64 << 20


@dataclass
class RunPreview:
    table: StepTable = field(default_factory=StepTable)
    step: int = 0
    last_s: float = 0.0
    ended: str | None = None
    """The reason of `run_ended`, if that is the last event but for others of no step."""
    has_extremes: bool = False
    """Whether no minimum and no maximum is missing."""


def preview_run(run_dir: Path) -> RunPreview | None:
    """None for a run that is short enough to be read at once, or whose file cannot be read."""
    path = run_dir / FOLDER / "rank-00000.jsonl"
    try:
        size = path.stat().st_size
        if size < MIN_BYTES:
            return None
        with path.open("rb") as file:
            blocks = []
            for number in range(LINES):
                file.seek(size * number // LINES)
                file.readline(MAX_LINE_BYTES)  # the rest of a line
                blocks.append(file.readline(MAX_LINE_BYTES))
            file.seek(size - TAIL_BYTES)
            blocks += file.read(TAIL_BYTES).splitlines()[1:]
        extremes = _extremes(run_dir / FOLDER / EXTREMES)
    except OSError:
        return None
    found = RunPreview(has_extremes=bool(extremes))
    lines = dict.fromkeys([*extremes, *blocks])  # each once; of equal times, in the order of the event file
    records = [record for one in _parsed(list(lines)) if (record := _usable(one)) is not None]
    for record in sorted(records, key=operator.itemgetter("time_s")):
        _add(found, record)
    return found


def _extremes(path: Path) -> list[bytes]:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_EXTREMES_BYTES:
        return []
    return path.read_bytes().splitlines()


def _add(preview: RunPreview, record: Record) -> None:
    kind, step = current_kind(record["kind"]), record.get("step", 0)
    preview.last_s = max(preview.last_s, float(record["time_s"]))
    if kind == "step_done" and step != preview.table.last_step:  # the tail repeats sampled lines
        preview.table.append(record)
        preview.step, preview.ended = step, None
    elif kind == "run_started":
        preview.ended = None
        if step < preview.table.last_step:
            preview.table.go_back(step)
    elif kind == "run_ended":
        preview.ended = str(record.get("reason", ""))


def _parsed(lines: list[bytes]) -> list[Any]:
    """All lines at once, which is twice as fast; one by one where any is damaged."""
    complete = [line.strip() for line in lines if line.rstrip().endswith(b"}")]
    try:
        found: list[Any] = json.loads(b"[" + b",".join(complete) + b"]")
    except (ValueError, RecursionError):
        return [_parse_line(line) for line in complete]
    return found


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # cut off, or damaged
        return None


def _usable(found: Any) -> Record | None:
    usable = isinstance(found, dict) and isinstance(found.get("kind"), str) and type(found.get("step", 0)) is int
    time_s: Any = found.get("time_s") if usable else None
    return found if type(time_s) in (int, float) and 0 <= time_s <= MAX_TIME_S else None
