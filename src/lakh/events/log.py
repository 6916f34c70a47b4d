"""Writing: `EventLog` appends the events of one rank to its file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lakh.errors import UserError
from lakh.events.extremes import StepExtremes
from lakh.events.kinds import Event, EventsDropped, StepDone

__all__ = ["FOLDER", "EventLog"]

QUEUE_EVENTS = 10_000
FOLDER = "events"


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
        self._extremes = StepExtremes(folder) if rank == 0 else None
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
            if self._extremes is not None:
                self._extremes.flush()

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
        record = event.as_dict()
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        self._file.write(line)
        if self._queue.empty():
            self._file.flush()
        if self._extremes is not None and isinstance(event, StepDone):
            self._extremes.add(record, line)
