"""Where a task is: what a step tells its engine on the way, so that a document that kills its process can be named.

A step is handed a `Trail`. `trail(n)` says that n more bytes of input are done; `trail.at(place)` says what is worked
on from now on. The place goes into a few bytes of memory that the driver shares with its worker (`Mark`) and outlives
the worker. A task that has lost a worker is done again *carefully*: documents go through the stages one at a time,
each announced, and those that `decide` has given up (`skipped`) are passed over with the reason `crashed`.

Knows names of places and deaths; knows neither documents nor processes. Costs a microsecond a document.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = [
    "MARKER_BYTES",
    "MAX_SKIPPED",
    "TASK_ATTEMPTS",
    "ProgressMarker",
    "RetryDecision",
    "TaskProgress",
    "decide_retry",
]

TASK_ATTEMPTS = 3
"""So many workers may die of one task, or of one document of it."""
MAX_SKIPPED = 16
"""A task with more deadly documents than that has another problem: a broken library, too little memory."""
MARKER_BYTES = 1024


class ProgressMarker:
    """A line of text in memory that two processes share."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, MARKER_BYTES)

    def write(self, text: str) -> None:
        data = _shortened(text).encode("utf-8", "backslashreplace")
        self._memory[: len(data) + 1] = data + b"\0"

    def read(self) -> str:
        return bytes(self._memory[:]).partition(b"\0")[0].decode("utf-8", "replace")

    def close(self) -> None:
        self._memory.close()


class TaskProgress:
    """A step's way to talk to its engine; by itself it talks to nobody."""

    def __init__(
        self,
        tell: Callable[[int], None] | None = None,
        mark: ProgressMarker | None = None,
        *,
        careful: bool = False,
        skipped: Sequence[str] = (),
    ) -> None:
        self._tell, self._mark = tell, mark
        self.careful = careful
        self._skipped = frozenset(skipped)

    def __call__(self, size_bytes: int) -> None:
        if self._tell is not None:
            self._tell(size_bytes)

    def at(self, place: str) -> None:
        """From now on `place` is worked on; "" is no place in particular."""
        if self._mark is not None:
            self._mark.write(place)

    def skips(self, place: str) -> bool:
        return bool(self._skipped) and _shortened(place) in self._skipped


class RetryDecision(NamedTuple):
    action: str
    """retry, skip (the place in `place`) or give-up."""
    place: str
    reason: str


def decide_retry(deaths: Sequence[str], num_skipped: int) -> RetryDecision:
    """What becomes of a task whose workers have died at these places; "" where the place is not known."""
    if len(deaths) < TASK_ATTEMPTS:
        return RetryDecision("retry", "", f"{len(deaths)} of {TASK_ATTEMPTS} workers")
    last = deaths[-1]
    known = sum(place == last for place in deaths)
    if not last or known < TASK_ATTEMPTS - 1:  # the first death is met before anybody is careful
        return RetryDecision("give-up", "", f"its worker died {len(deaths)} times, not at one document")
    if num_skipped >= MAX_SKIPPED:
        return RetryDecision("give-up", last, f"more than {MAX_SKIPPED} of its documents kill their worker")
    return RetryDecision("skip", last, f"its worker died {len(deaths)} times")


def _shortened(place: str) -> str:
    place = place.replace("\0", " ")
    if len(place) <= MARKER_BYTES // 8:  # a character may take six bytes and more when it is escaped
        return place
    return f"{place[: MARKER_BYTES // 8 - 17]} {hashlib.sha256(place.encode('utf-8', 'replace')).hexdigest()[:16]}"
