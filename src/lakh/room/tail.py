"""New lines of a run's event files, in order of time, a bounded bite at a time.

Gives plain records (dicts with `time_s`, `rank`, `step`, `kind`), not typed events: a run that another version wrote is
shown as far as it can be read. A half-written last line is left until it is whole; a line that is no record is counted
and passed over. A file that was replaced by a shorter or another one raises `Replaced`: begin again.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from lakh.events import FOLDER

__all__ = ["Record", "Replaced", "Tails"]

Record = dict[str, Any]
BITE_BYTES = 1 << 20


class Replaced(Exception):
    """The files are no longer those that were read."""


class _Tail:
    """Where the reader stands in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.size_bytes = 0
        self.inode = 0
        self.unreadable = 0
        self.waiting: list[Record] = []
        self.stuck_at = -1
        """Size at which the rest was only a half-written line."""

    @property
    def has_more(self) -> bool:
        return self.offset < self.size_bytes and self.stuck_at != self.size_bytes

    def look(self, found: os.stat_result) -> None:
        if self.inode not in (0, found.st_ino) or found.st_size < self.offset:
            raise Replaced
        self.inode, self.size_bytes = found.st_ino, found.st_size

    def bite(self) -> None:
        """Read on, to the end of the last whole line within a bite."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                block = file.read(BITE_BYTES)
        except OSError:  # not ours to read, or just removed: tried again when it has grown
            self.unreadable += 1
            self.stuck_at = self.size_bytes
            return
        end = block.rfind(b"\n") + 1
        if not end:
            if len(block) == BITE_BYTES:  # no record is so long: a hole that a crash left
                self.offset += len(block)
                self.unreadable += 1
            else:
                self.stuck_at = self.size_bytes
            return
        self.offset += end
        self.waiting += self._parse(block[:end].splitlines())

    def _parse(self, lines: list[bytes]) -> list[Record]:
        try:  # all at once is twice as fast as one by one
            parsed = json.loads(b"[" + b",".join(lines) + b"]")
        except ValueError:
            parsed = [_parse_line(line) for line in lines]
        records = [record for record in parsed if _is_record(record)]
        self.unreadable += len(parsed) - len(records)
        return records


class Tails:
    """All event files of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._tails: dict[str, _Tail] = {}

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
        """What is new, in order of time, and whether more waits after `budget_s` seconds of reading."""
        self._look()
        deadline_s = time.monotonic() + budget_s
        found: list[Record] = []
        tails = list(self._tails.values())
        while True:
            for tail in tails:
                while tail.has_more and not tail.waiting:
                    tail.bite()
            unread = [tail for tail in tails if tail.has_more]
            # What a file has not told yet is later than the last that it told.
            horizon_s = min((tail.waiting[-1]["time_s"] for tail in unread), default=float("inf"))
            ready = []
            for tail in tails:
                if not tail.waiting:
                    continue
                if tail.waiting[-1]["time_s"] <= horizon_s:
                    ready += tail.waiting
                    tail.waiting = []
                else:
                    ready += [record for record in tail.waiting if record["time_s"] <= horizon_s]
                    tail.waiting = [record for record in tail.waiting if record["time_s"] > horizon_s]
            ready.sort(key=lambda record: record["time_s"])
            found += ready
            if not unread or time.monotonic() > deadline_s:
                return found, bool(unread)

    def _look(self) -> None:
        seen = set()
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if not (entry.name.startswith("rank-") and entry.name.endswith(".jsonl")):
                        continue
                    seen.add(entry.name)
                    tail = self._tails.setdefault(entry.name, _Tail(self._folder / entry.name))
                    tail.look(entry.stat())
        except OSError:  # no events yet
            pass
        if not seen.issuperset(self._tails):
            raise Replaced


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
