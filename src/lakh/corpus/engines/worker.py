"""One worker process of the local engine: runs tasks from its channel until the channel closes.

Started by worker_pool.py. Sends progress and `TaskDone`; an error of a task ends the process and is raised in the
driver. When it runs out of memory it exits immediately, because nothing it could still do is reliable; its progress
marker names the document.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

from lakh.child_process import Channel
from lakh.corpus.engines.worker_pool import OUT_OF_MEMORY, TaskDone
from lakh.corpus.task_progress import ProgressMarker, TaskProgress

__all__ = ["main"]


def main(channel: Channel, marker_fd: int, memory_bytes: int) -> None:
    sys.meta_path.insert(0, _ModuleBlocker())
    # Private data only, which is what grows: mapped code and files are shared.
    limits = [memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]]
    limit = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    marker, reported_s = ProgressMarker(marker_fd), 0.0  # the first task also accounts for the start
    while True:
        try:
            function, argument, number, one_at_a_time, skipped = channel.receive()
            function(argument, number, TaskProgress(channel.send, marker, one_at_a_time=one_at_a_time, skipped=skipped))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        spent_s = _cpu_seconds()
        channel.send(TaskDone(number, spent_s - reported_s, peak))
        reported_s = spent_s


def _cpu_seconds() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))


class _ModuleBlocker:
    """Hides modules that pyarrow and numba import if they are installed: half a second, and not needed here."""

    NAMES = frozenset({"pandas", "scipy"})

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self.NAMES:
            raise ModuleNotFoundError(name)
