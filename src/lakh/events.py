"""Events: facts about a run, written once as JSON lines and read by everything that shows the run.

Each rank appends to its own `events/rank-00003.jsonl`; no line is rewritten. The progress bar, Prometheus, TensorBoard
and the dashboard all read these files.

    {"time_s": 1731.4, "rank": 0, "step": 12, "kind": "step_done", "loss": 5.13, ...}

`EventLog.write` puts the event into a bounded queue that a thread empties, so that a slow disk does not delay a step.
When the queue is full, events are dropped and counted, and the count is written as `events_dropped`. Readers wait for
the rest of a partly written last line, read kinds of earlier versions under their current name, and return a kind they
do not know as `UnknownEvent`.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, dataclass_transform

from lakh.errors import UserError

__all__ = [
    "AutoChoice",
    "CheckpointSaved",
    "CheckpointSkipped",
    "Evaluated",
    "Event",
    "EventFilesReplaced",
    "EventLog",
    "EventsDropped",
    "FaultInjected",
    "HookMetrics",
    "Initialised",
    "NetworkTraffic",
    "RanksLost",
    "Record",
    "Resources",
    "Restarted",
    "RewindRefused",
    "Rewound",
    "RunEnded",
    "RunEventTail",
    "RunStarted",
    "Scored",
    "SettingChanged",
    "StepDone",
    "StepSkipped",
    "UnknownEvent",
    "current_kind",
    "follow",
    "read",
]

QUEUE_EVENTS = 10_000
READ_BYTES = 1 << 20
FOLDER = "events"
Record = dict[str, Any]
# Kinds of lakh before 2026-11-17 -> today's.
OLD_KINDS = {
    "chosen": "auto_choice",
    "fault_struck": "fault_injected",
    "measured": "hook_metrics",
    "traffic": "network_traffic",
}


def current_kind(kind: str) -> str:
    """Today's name of an event kind that any version wrote."""
    return OLD_KINDS.get(kind, kind)


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """The fields of every event; subclasses are dataclasses too. `time_s` is seconds since 1970, set when written."""

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[Event]]] = {}
    time_s: float = 0.0
    rank: int = 0
    step: int = 0

    def __init_subclass__(cls, kind: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kind = kind
        Event.kinds[kind] = dataclass(frozen=True, kw_only=True)(cls)

    def as_dict(self) -> dict[str, Any]:
        return {"time_s": self.time_s, "rank": self.rank, "step": self.step, "kind": self.kind} | vars(self)


class RunStarted(Event, kind="run_started"):
    """A rank has joined the run and restored its state."""

    world: int
    attempt: int
    backend: str
    device: str
    parameters: int
    sequence_index: int
    run_sha256: str
    data_sha256: str


class StepDone(Event, kind="step_done"):
    """One optimizer update. `loss` is the mean over all ranks, in nats per token."""

    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    step_s: float
    data_wait_s: float
    mfu: float | None = None


class StepSkipped(Event, kind="step_skipped"):
    """An update that was not applied, and the reason."""

    reason: str


class Evaluated(Event, kind="evaluated"):
    """Mean loss on held-out documents, in nats per token."""

    loss: float
    sequences: int
    seconds: float


class Initialised(Event, kind="initialised"):
    """A rank is about to take its first step. `seconds` is the time since it started."""

    seconds: float


class Resources(Event, kind="resources"):
    """Every few steps: peak memory of this rank, batches that are prefetched, and steps that waited for data."""

    memory_bytes: int
    data_ready: int
    data_starved: int


class NetworkTraffic(Event, kind="network_traffic"):
    """Bytes that this rank sent in one step, by tier of the cluster."""

    sent_bytes: Mapping[str, int]


class HookMetrics(Event, kind="hook_metrics"):
    """The values that an evaluation hook returned."""

    hook: str
    values: Mapping[str, float]


class Rewound(Event, kind="rewound"):
    """Training returned to an earlier step. `skipped` are [first, end) ranges of sequences that it no longer reads."""

    to_step: int
    reason: str
    skipped: Sequence[Sequence[int]]


class RewindRefused(Event, kind="rewind_refused"):
    """A rewind was due and not possible."""

    reason: str
    why: str


class Scored(Event, kind="scored"):
    """A checkpoint was scored on a benchmark. `step` is the checkpoint's."""

    task: str
    pass_at_1: float | None
    low: float | None
    high: float | None
    passed: int
    total: int
    seconds: float
    path: str


class CheckpointSaved(Event, kind="checkpoint_saved"):
    """A checkpoint is complete. `seconds` is how long training paused for it, not how long writing took."""

    path: str
    bytes: int
    seconds: float


class CheckpointSkipped(Event, kind="checkpoint_skipped"):
    """A damaged checkpoint that resume skipped."""

    path: str
    reason: str


class AutoChoice(Event, kind="auto_choice"):
    """The value that lakh chose for a setting of "auto", and the reason."""

    what: str
    choice: str
    reason: str


class SettingChanged(Event, kind="setting_changed"):
    """A run resumes with a setting that differs from its checkpoint's."""

    path: str
    before: Any
    after: Any


class FaultInjected(Event, kind="fault_injected"):
    """A planned fault, written just before it happens."""

    fault: str


class Restarted(Event, kind="restarted"):
    """The launcher restarted all ranks."""

    attempt: int
    reason: str


class RanksLost(Event, kind="ranks_lost"):
    """Ranks died, and the others continue without them and without a restart."""

    lost: tuple[int, ...]
    left: int
    reason: str
    seconds: float
    """From detecting the loss until the remaining ranks agreed on one state."""


class RunEnded(Event, kind="run_ended"):
    reason: str
    seconds: float


class EventsDropped(Event, kind="events_dropped"):
    """The queue was full: `count` events before this one were not written."""

    count: int


class UnknownEvent(Event, kind="other"):
    """An event of a kind that this version does not define."""

    name: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


class EventLog:
    """Appends events of one rank. Use as a context manager, or call `close` at the end."""

    def __init__(
        self,
        run_dir: str | Path,
        rank: int = 0,
        *,
        clock: Callable[[], float] = time.time,
        queue_events: int = QUEUE_EVENTS,
    ) -> None:
        folder = Path(run_dir) / FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"rank-{rank:05d}.jsonl").open("ab")
        except OSError as error:
            raise UserError(str(folder), f"cannot be written ({error.strerror})", "choose another folder") from None
        self.rank = rank
        self._clock = clock
        self._queue: queue.Queue[Event | None] = queue.Queue(maxsize=queue_events)
        self._dropped = 0
        self._thread = threading.Thread(target=self._drain, name="lakh-events", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Queue the event and return immediately."""
        stamped = dataclasses.replace(event, time_s=event.time_s or self._clock(), rank=self.rank)
        try:
            self._queue.put_nowait(stamped)
        except queue.Full:
            self._dropped += 1

    def close(self, timeout_s: float = 10.0) -> None:
        """Write the queued events. Waits at most `timeout_s`."""
        if not self._file.closed:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
            self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drain(self) -> None:
        while True:
            event = self._queue.get()
            dropped, self._dropped = self._dropped, 0
            try:
                if dropped:
                    step = event.step if event else 0
                    self._append(EventsDropped(time_s=self._clock(), rank=self.rank, step=step, count=dropped))
                if event is None:
                    return
                self._append(event)
            except (OSError, ValueError):  # a full disk must not stop the run; dropped events are counted
                self._dropped += dropped + 1
                if event is None:
                    return

    def _append(self, event: Event) -> None:
        self._file.write(json.dumps(event.as_dict(), separators=(",", ":")).encode() + b"\n")
        if self._queue.empty():
            self._file.flush()


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
    incomplete last line is read once it is complete; malformed lines are counted and skipped.
    """

    def __init__(self, run_dir: str | Path, rank: int | None = None) -> None:
        self._folder = Path(run_dir) / FOLDER
        self._pattern = "rank-*.jsonl" if rank is None else f"rank-{rank:05d}.jsonl"
        self._files: dict[Path, EventFileTail] = {}
        self._pending: list[Record] = []

    def new_records(self, budget_s: float = math.inf) -> tuple[list[Record], bool]:
        """New records, and whether unread data is left after about `budget_s` seconds of reading."""
        self._find_files()
        deadline_s = time.monotonic() + budget_s
        while unread := [file for file in self._files.values() if file.has_more]:
            self._pending += min(unread, key=lambda file: file.last_s).read_block()
            if time.monotonic() > deadline_s:
                unread = [file for file in unread if file.has_more]
                break
        # Records within a file are ordered: what is unread comes after its last record.
        horizon_s = min((file.last_s for file in unread), default=math.inf)
        self._pending.sort(key=_time_of)
        num_ready = bisect.bisect_right(self._pending, horizon_s, key=_time_of)
        ready, self._pending = self._pending[:num_ready], self._pending[num_ready:]
        return ready, bool(unread)

    def progress(self) -> dict[str, int]:
        files = self._files.values()
        return {
            "unreadable_lines": sum(file.unreadable for file in files),
            "files": len(files),
            "bytes": sum(file.offset for file in files),
            "of_bytes": sum(file.size_bytes for file in files),
        }

    def _find_files(self) -> None:
        found = {}
        for path in sorted(self._folder.glob(self._pattern)):
            with contextlib.suppress(OSError):  # removed in the meantime
                found[path] = path.stat()
        if not self._files.keys() <= found.keys():
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

    def read_block(self) -> list[Record]:
        """The records up to the last complete line within READ_BYTES."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                block = file.read(READ_BYTES)
        except OSError:  # no permission, or just removed: try again when the file grows
            self.unreadable += 1
            self.stuck_at = self.size_bytes
            return []
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


def _time_of(record: Record) -> float:
    time_s: float = record["time_s"]
    return time_s


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
