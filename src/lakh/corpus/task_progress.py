"""What a running task reports to its engine: bytes done, and the document it is working on.

A step gets a `TaskProgress`. `advance(n)` reports n more bytes of input; `mark(place)` records the current document in
a `ProgressMarker`, a few bytes of memory that the driver shares with its worker and that outlive the worker. A task
that has lost a worker runs again with `one_at_a_time` set: documents pass the filters one by one, each marked first,
and the documents that `decide_retry` gives up (`skipped`) are dropped with the reason `crashed`.

Cost: a microsecond a document.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["MARKER_BYTES", "MAX_SKIPPED", "TASK_ATTEMPTS", "ProgressMarker", "TaskProgress", "decide_retry"]

TASK_ATTEMPTS = 3
"""Worker deaths that end the retries of a task, or of one document of it."""
MAX_SKIPPED = 16
"""More crashing documents than this in one task point to another problem: a broken library, too little memory."""
MARKER_BYTES = 1024


class ProgressMarker:
    """A line of text in memory shared by two processes."""

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
    """How a step reports to its engine; without arguments it reports nothing."""

    def __init__(
        self,
        report: Callable[[int], None] | None = None,
        marker: ProgressMarker | None = None,
        *,
        one_at_a_time: bool = False,
        skipped: Sequence[str] = (),
    ) -> None:
        self._report, self._marker = report, marker
        self.one_at_a_time = one_at_a_time
        self._skipped = frozenset(skipped)

    def advance(self, size_bytes: int) -> None:
        if self._report is not None:
            self._report(size_bytes)

    def mark(self, place: str) -> None:
        """Record that the task now works on `place`; "" is no particular place."""
        if self._marker is not None:
            self._marker.write(place)

    def skips(self, place: str) -> bool:
        return bool(self._skipped) and _shortened(place) in self._skipped


class RetryDecision(NamedTuple):
    action: str
    """retry, skip (the document in `place`) or give-up."""
    place: str
    reason: str


def decide_retry(deaths: Sequence[str], num_skipped: int) -> RetryDecision:
    """What to do with a task whose workers died at these places; "" is an unknown place."""
    if len(deaths) < TASK_ATTEMPTS:
        return RetryDecision("retry", "", f"{len(deaths)} of {TASK_ATTEMPTS} workers")
    last = deaths[-1]
    same_place = sum(place == last for place in deaths)
    if not last or same_place < TASK_ATTEMPTS - 1:  # the place of the first death is unknown
        return RetryDecision("give-up", "", f"its worker died {len(deaths)} times, not at one document")
    if num_skipped >= MAX_SKIPPED:
        return RetryDecision("give-up", last, f"more than {MAX_SKIPPED} of its documents kill their worker")
    return RetryDecision("skip", last, f"its worker died {len(deaths)} times")


def _shortened(place: str) -> str:
    place = place.replace("\0", " ")
    if len(place) <= MARKER_BYTES // 8:  # an escaped character may take six bytes and more
        return place
    return f"{place[: MARKER_BYTES // 8 - 17]} {hashlib.sha256(place.encode('utf-8', 'replace')).hexdigest()[:16]}"
