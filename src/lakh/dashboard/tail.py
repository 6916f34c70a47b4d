"""Reads new lines of a run's event files, in order of time, a bounded amount per call.

Returns plain records (dicts with `time_s`, `rank`, `step`, `kind`) instead of typed events, so that runs of other
versions can be shown. An incomplete last line is read once it is complete; malformed lines are counted and skipped. A
file that was replaced or truncated raises `EventFilesReplaced`: start over.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from lakh.events import FOLDER

__all__ = ["EventFilesReplaced", "Record", "RunEventTail"]

Record = dict[str, Any]
READ_BYTES = 1 << 20


class EventFilesReplaced(Exception):
    """An event file was replaced or truncated since it was last read."""


class EventFileTail:
    """The read position in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.size_bytes = 0
        self.inode = 0
        self.unreadable = 0
        self.pending: list[Record] = []
        self.stuck_at = -1
        """File size at which only an incomplete line was left."""

    @property
    def has_more(self) -> bool:
        return self.offset < self.size_bytes and self.stuck_at != self.size_bytes

    def update_size(self, found: os.stat_result) -> None:
        if self.inode not in (0, found.st_ino) or found.st_size < self.offset:
            raise EventFilesReplaced
        self.inode, self.size_bytes = found.st_ino, found.st_size

    def read_block(self) -> None:
        """Read to the end of the last complete line within READ_BYTES."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                block = file.read(READ_BYTES)
        except OSError:  # no permission, or just removed: try again when the file grows
            self.unreadable += 1
            self.stuck_at = self.size_bytes
            return
        end = block.rfind(b"\n") + 1
        if not end:
            if len(block) == READ_BYTES:  # longer than any record: garbage left by a crash
                self.offset += len(block)
                self.unreadable += 1
            else:
                self.stuck_at = self.size_bytes
            return
        self.offset += end
        self.pending += self._parse(block[:end].splitlines())

    def _parse(self, lines: list[bytes]) -> list[Record]:
        try:  # parsing all lines at once is twice as fast
            parsed = json.loads(b"[" + b",".join(lines) + b"]")
        except ValueError:
            parsed = [_parse_line(line) for line in lines]
        records = [record for record in parsed if _is_record(record)]
        self.unreadable += len(parsed) - len(records)
        return records


class RunEventTail:
    """All event files of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._tails: dict[str, EventFileTail] = {}

    @property
    def unreadable(self) -> int:
        return sum(tail.unreadable for tail in self._tails.values())

    @property
    def read_bytes(self) -> int:
        return sum(tail.offset for tail in self._tails.values())

    @property
    def size_bytes(self) -> int:
        return sum(tail.size_bytes for tail in self._tails.values())

    @property
    def files(self) -> int:
        return len(self._tails)

    def new_records(self, budget_s: float) -> tuple[list[Record], bool]:
        """New records in order of time, and whether unread data is left after `budget_s` seconds of reading."""
        self._find_files()
        deadline_s = time.monotonic() + budget_s
        found: list[Record] = []
        tails = list(self._tails.values())
        while True:
            for tail in tails:
                while tail.has_more and not tail.pending:
                    tail.read_block()
            unread = [tail for tail in tails if tail.has_more]
            # Records within a file are ordered: what is unread comes after its last record.
            horizon_s = min((tail.pending[-1]["time_s"] for tail in unread), default=float("inf"))
            ready = []
            for tail in tails:
                if not tail.pending:
                    continue
                if tail.pending[-1]["time_s"] <= horizon_s:
                    ready += tail.pending
                    tail.pending = []
                else:
                    ready += [record for record in tail.pending if record["time_s"] <= horizon_s]
                    tail.pending = [record for record in tail.pending if record["time_s"] > horizon_s]
            ready.sort(key=lambda record: record["time_s"])
            found += ready
            if not unread or time.monotonic() > deadline_s:
                return found, bool(unread)

    def _find_files(self) -> None:
        seen = set()
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if not (entry.name.startswith("rank-") and entry.name.endswith(".jsonl")):
                        continue
                    seen.add(entry.name)
                    tail = self._tails.setdefault(entry.name, EventFileTail(self._folder / entry.name))
                    tail.update_size(entry.stat())
        except OSError:  # no events yet
            pass
        if not seen.issuperset(self._tails):
            raise EventFilesReplaced


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _is_record(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("kind"), str)
        and isinstance(found.get("time_s"), int | float)
        and isinstance(found.get("step", 0), int)
    )
