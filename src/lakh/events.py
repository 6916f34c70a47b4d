"""Facts about a run, written once as JSON lines and read by everyone.

Each rank appends to its own `events/rank-00003.jsonl`; nobody rewrites a line. The progress bar, Prometheus,
TensorBoard and the dashboard are readers of these files and have no private channel.

    {"time_s": 1731.4, "rank": 0, "step": 12, "kind": "step_done", "loss": 5.13, ...}

Writing never blocks a training step: `Log.write` puts the event into a bounded queue that a thread empties. Where the
disk is slower than the run, events are dropped *and counted*, and the count is itself an event (`events_dropped`).
A reader skips a half-written last line and returns to it, and gives a kind that it does not know as `Other`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from lakh.errors import UserError

__all__ = [
    "CheckpointSaved",
    "CheckpointSkipped",
    "Chosen",
    "Evaluated",
    "Event",
    "EventsDropped",
    "FaultStruck",
    "Initialised",
    "Log",
    "Measured",
    "Other",
    "RanksLost",
    "Resources",
    "Restarted",
    "RewindRefused",
    "Rewound",
    "RunEnded",
    "RunStarted",
    "Scored",
    "SettingChanged",
    "StepDone",
    "StepSkipped",
    "Traffic",
    "follow",
    "read",
]

QUEUE_EVENTS = 10_000
FOLDER = "events"


@dataclass(frozen=True, kw_only=True)
class Event:
    """What every event carries. `time_s` is seconds since 1970, set when it is written."""

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[Event]]] = {}
    time_s: float = 0.0
    rank: int = 0
    step: int = 0

    def __init_subclass__(cls, kind: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kind = kind
        Event.kinds[kind] = cls

    def as_dict(self) -> dict[str, Any]:
        base = {"time_s": self.time_s, "rank": self.rank, "step": self.step, "kind": self.kind}
        return base | {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in base}


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event, kind="run_started"):
    """A process group is up and knows where in the data it stands."""

    world: int
    attempt: int
    backend: str
    device: str
    parameters: int
    sequence_index: int
    run_sha256: str
    data_sha256: str


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class StepSkipped(Event, kind="step_skipped"):
    """An update that was not applied, and why."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event, kind="evaluated"):
    """Mean loss on held-out documents, in nats per token."""

    loss: float
    sequences: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Initialised(Event, kind="initialised"):
    """A rank is about to take its first step, so many seconds after it started."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Resources(Event, kind="resources"):
    """Now and then: the most memory that this rank has used, batches that wait for it, steps that waited for data."""

    memory_bytes: int
    data_ready: int
    data_starved: int


@dataclass(frozen=True, kw_only=True)
class Traffic(Event, kind="traffic"):
    """What this rank sent in one step, by tier of the cluster."""

    sent_bytes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Measured(Event, kind="measured"):
    """What an evaluation hook returned."""

    hook: str
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Rewound(Event, kind="rewound"):
    """Training went back to an earlier step; `skipped` are [first, end) ranges of sequences left out for good."""

    to_step: int
    reason: str
    skipped: Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class RewindRefused(Event, kind="rewind_refused"):
    """A rewind was due and could not be made."""

    reason: str
    why: str


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event, kind="checkpoint_saved"):
    """A checkpoint became whole. `seconds` is how long training stood still for it, not how long it was written."""

    path: str
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckpointSkipped(Event, kind="checkpoint_skipped"):
    """A checkpoint that was found damaged and passed over on resume."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Chosen(Event, kind="chosen"):
    """What was left to lakh, what it chose, and why."""

    what: str
    choice: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SettingChanged(Event, kind="setting_changed"):
    """A run goes on with another setting than its checkpoint was saved with."""

    path: str
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True)
class FaultStruck(Event, kind="fault_struck"):
    """A planned injury, written just before it happens."""

    fault: str


@dataclass(frozen=True, kw_only=True)
class Restarted(Event, kind="restarted"):
    """The launcher started all ranks again."""

    attempt: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RanksLost(Event, kind="ranks_lost"):
    """Ranks died, and the others go on without them and without a restart."""

    lost: tuple[int, ...]
    left: int
    reason: str
    seconds: float
    """From the moment the loss was noticed until the others had agreed on one state."""


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event, kind="run_ended"):
    reason: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EventsDropped(Event, kind="events_dropped"):
    """The queue was full: this many events before this one were not written."""

    count: int


@dataclass(frozen=True, kw_only=True)
class Other(Event, kind="other"):
    """An event of a kind that this version does not know."""

    name: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


class Log:
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
        """Queue the event and return at once."""
        stamped = dataclasses.replace(event, time_s=event.time_s or self._clock(), rank=self.rank)
        try:
            self._queue.put_nowait(stamped)
        except queue.Full:
            self._dropped += 1

    def close(self, timeout_s: float = 10.0) -> None:
        """Write out what is queued. Waits for a stuck disk no longer than `timeout_s`."""
        if not self._file.closed:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
            self._file.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            except (OSError, ValueError):  # a full disk must not stop the run; the loss is counted
                self._dropped += dropped + 1
                if event is None:
                    return

    def _append(self, event: Event) -> None:
        self._file.write(json.dumps(event.as_dict(), separators=(",", ":")).encode() + b"\n")
        if self._queue.empty():
            self._file.flush()


def read(run_dir: str | Path, rank: int | None = None) -> list[Event]:
    """All events so far, of one rank or of all in order of time."""
    events = [event for tail in _tails(run_dir, rank, {}) for event in tail.new_events()]
    return sorted(events, key=lambda event: event.time_s)


def follow(
    run_dir: str | Path,
    rank: int | None = None,
    *,
    since_s: float = 0.0,
    poll_s: float = 0.2,
    until: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Events written at or after `since_s`, as they appear; ends when `until()` is true and all was read."""
    tails: dict[Path, _Tail] = {}
    while True:
        last = until()
        found = [event for tail in _tails(run_dir, rank, tails) for event in tail.new_events()]
        yield from sorted((e for e in found if e.time_s >= since_s), key=lambda event: event.time_s)
        if last:
            return
        time.sleep(poll_s)


class _Tail:
    """Where a reader stands in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def new_events(self) -> Iterator[Event]:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self.offset += len(line)
                event = _parse(line)
                if event is not None:
                    yield event


def _tails(run_dir: str | Path, rank: int | None, known: dict[Path, _Tail]) -> list[_Tail]:
    pattern = "rank-*.jsonl" if rank is None else f"rank-{rank:05d}.jsonl"
    for path in sorted((Path(run_dir) / FOLDER).glob(pattern)):
        known.setdefault(path, _Tail(path))
    return list(known.values())


def _parse(line: bytes) -> Event | None:
    """None for a line torn by a crash: the fact is lost, the rest of the file is not."""
    try:
        data = json.loads(line)
        kind = data.pop("kind")
        base = {key: data.pop(key) for key in ("time_s", "rank", "step")}
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    cls = Event.kinds.get(kind)
    if cls is not None and cls is not Other:
        with contextlib.suppress(TypeError):
            return cls(**base, **data)
    return Other(**base, name=kind, fields=data)
