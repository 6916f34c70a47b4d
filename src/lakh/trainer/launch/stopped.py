"""Find processes that a signal has stopped (SIGSTOP) and nobody has continued. Independent of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["StoppedProcesses", "is_stopped"]

POLL_S = 1.0


def is_stopped(pid: int) -> bool:
    """Whether the kernel lists the process as stopped (Linux). False for one that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


class StoppedProcesses:
    """How long each process has been stopped, by a clock that stands still while this process is stopped itself."""

    def __init__(
        self, pids: Sequence[int], timeout_s: float, *, is_stopped: Callable[[int], bool] = is_stopped
    ) -> None:
        self._pids, self.timeout_s, self._is_stopped = list(pids), timeout_s, is_stopped
        self._stopped_s = [0.0] * len(pids)
        self._polled_s: float | None = None

    def replace(self, index: int, pid: int) -> None:
        """Another process has taken the place of one that ended."""
        self._pids[index], self._stopped_s[index] = pid, 0.0

    def find_overdue(self, now_s: float) -> list[int]:
        """The indexes of processes that have been stopped for longer than the timeout."""
        if self._polled_s is not None and now_s - self._polled_s < POLL_S:
            return []
        # A long gap means that this process was stopped too (a suspended machine, a paused container).
        passed_s = min(now_s - self._polled_s, 2 * POLL_S) if self._polled_s is not None else 0.0
        self._polled_s = now_s
        for index, pid in enumerate(self._pids):
            self._stopped_s[index] = self._stopped_s[index] + passed_s if self._is_stopped(pid) else 0.0
        return [index for index, stopped_s in enumerate(self._stopped_s) if stopped_s > self.timeout_s]
