"""Reading: all events of a run, those that appear from now on, or raw records for a dashboard."""

from __future__ import annotations

import bisect
import contextlib
import fnmatch
import heapq
import json
import math
import operator
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lakh.events.kinds import Event, Record, UnknownEvent, current_kind
from lakh.events.log import FOLDER

__all__ = ["EventFilesReplaced", "RunEventTail", "follow", "read"]

READ_BYTES = 1 << 20


def read(run_dir: str | Path, rank: int | None = None) -> list[Event]:
    """All events so far, of one rank or of all in order of time."""
    records, _ = RunEventTail(run_dir, rank).new_records()
    return [event for record in records if (event := _as_event(record)) is not None]


def follow(
    run_dir: str | Path,
    rank: int | None = None,
    *,
    since_s: float = 0.0,
    poll_s: float = 0.2,
    until: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Events from `since_s` on, as they appear; ends when `until()` is true and everything is read."""
    tail = RunEventTail(run_dir, rank)
    while True:
        last = until()
        try:
            records, _ = tail.new_records()
        except EventFilesReplaced:
            tail = RunEventTail(run_dir, rank)
            continue
        for record in records:
            event = _as_event(record)
            if event is not None and event.time_s >= since_s:
                yield event
        if last:
            return
        time.sleep(poll_s)


class EventFilesReplaced(Exception):
    """An event file was replaced, truncated or removed since it was last read: start over with a new tail."""


class RunEventTail:
    """Reads new records of a run's event files, of one rank or of all, in order of time.

    Records are plain dicts with `time_s`, `rank`, `step`, `kind`, so that runs of other versions can be shown. An
    incomplete last line is read once it is complete; malformed lines are counted and skipped. What cannot be opened is
    in `unreadable`, and tried again at every call.
    """

    def __init__(self, run_dir: str | Path, rank: int | None = None) -> None:
        self._folder = Path(run_dir) / FOLDER
        self._pattern = "rank-*.jsonl" if rank is None else f"rank-{rank:05d}.jsonl"
        self._files: dict[Path, EventFileTail] = {}
        self._not_found: dict[Path, str] = {}
        """The folder or files that cannot be looked at -> the reason."""
        self._pending: list[Record] = []

    def new_records(self, budget_s: float = math.inf, max_records: float = math.inf) -> tuple[list[Record], bool]:
        """New records, and whether unread data is left after about `budget_s` seconds, or `max_records` records."""
        self._find_files()
        deadline_s = time.monotonic() + budget_s
        files = enumerate(self._files.values())
        unread = [(file.last_s, number, file) for number, file in files if file.has_more]
        heapq.heapify(unread)
        while unread:
            _, number, file = heapq.heappop(unread)
            self._pending += file.read_block()
            if file.has_more:
                heapq.heappush(unread, (file.last_s, number, file))
            if time.monotonic() > deadline_s or len(self._pending) >= max_records:
                break
        by_time = operator.itemgetter("time_s")
        # Records within a file are ordered: what is unread comes after its last record.
        horizon_s = unread[0][0] if unread else math.inf
        self._pending.sort(key=by_time)
        num_ready = bisect.bisect_right(self._pending, horizon_s, key=by_time)
        ready, self._pending = self._pending[:num_ready], self._pending[num_ready:]
        return ready, bool(unread)

    @property
    def unreadable(self) -> dict[Path, str]:
        """The folder, or files in it, that cannot be read now, and the reasons; the folder and low ranks first."""
        refused = {file.path: file.refusal for file in self._files.values() if file.refusal}
        return dict(sorted((refused | self._not_found).items()))

    def progress(self) -> dict[str, int]:
        files = self._files.values()
        return {
            "unreadable_lines": sum(file.unreadable for file in files),
            "files": len(files),
            "bytes": sum(file.offset for file in files),
            "of_bytes": sum(file.size_bytes for file in files),
        }

    def _find_files(self) -> None:
        self._not_found = {}
        try:
            names = fnmatch.filter(os.listdir(self._folder), self._pattern)  # noqa: PTH208 - Path.glob hides errors
        except FileNotFoundError:
            names = []
        except OSError as error:
            self._not_found[self._folder] = error.strerror or str(error)
            return
        found = {}
        for path in sorted(self._folder / name for name in names):
            try:
                found[path] = path.stat()
            except FileNotFoundError:  # removed in the meantime
                pass
            except OSError as error:
                self._not_found[path] = error.strerror or str(error)
        if not self._files.keys() <= found.keys() | self._not_found.keys():
            raise EventFilesReplaced
        for path, status in found.items():
            self._files.setdefault(path, EventFileTail(path)).update_size(status)


class EventFileTail:
    """The read position in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.size_bytes = 0
        self.inode = 0
        self.unreadable = 0
        """Lines."""
        self.refusal = ""
        """Why it could not be opened the last time."""
        self.last_s = -math.inf
        """Time of the last record that was read."""
        self.stuck_at = -1
        """File size at which only an incomplete line was left."""

    @property
    def has_more(self) -> bool:
        return self.offset < self.size_bytes and self.stuck_at != self.size_bytes

    def update_size(self, found: os.stat_result) -> None:
        if self.inode not in (0, found.st_ino) or found.st_size < self.offset:
            raise EventFilesReplaced
        self.inode, self.size_bytes = found.st_ino, found.st_size
        if self.refusal:
            self.stuck_at = -1

    def read_block(self) -> list[Record]:
        """The records up to the last complete line within READ_BYTES."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                block = file.read(READ_BYTES)
        except OSError as error:
            self.refusal = "" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
            self.stuck_at = self.size_bytes
            return []
        self.refusal = ""
        end = block.rfind(b"\n") + 1
        if not end and len(block) < READ_BYTES:
            self.stuck_at = self.size_bytes
            return []
        lines = block[:end].splitlines() or [block]  # without a newline: garbage left by a crash
        self.offset += end or len(block)
        try:  # parsing all lines at once is twice as fast
            parsed = json.loads(b"[" + b",".join(lines) + b"]")
        except ValueError:
            parsed = [_parse_line(line) for line in lines]
        records = [record for record in parsed if _is_record(record)]
        self.unreadable += len(parsed) - len(records)
        if records:
            self.last_s = records[-1]["time_s"]
        return records


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


def _as_event(record: Record) -> Event | None:
    """None for a record without a rank or a step."""
    fields = dict(record)
    kind = fields.pop("kind")
    try:
        base = {key: fields.pop(key) for key in ("time_s", "rank", "step")}
    except KeyError:
        return None
    cls = Event.kinds.get(current_kind(kind))
    if cls is not None and cls is not UnknownEvent:
        with contextlib.suppress(TypeError):
            return cls(**base, **fields)
    return UnknownEvent(**base, name=kind, fields=fields)
