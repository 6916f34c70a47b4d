"""One worker process of the local engine: tasks from a socket, until it closes.

Started by workers.py as `python -m lakh.corpus.engines.worker SOCKET MARK MEMORY`: two descriptors, and the bytes of
memory that it may have. Says ticks and `Done`, or what went wrong. Out of memory, it ends at once: nothing that it
would still do could be relied on, and its driver knows where it was.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from lakh.corpus.engines.worker_pool import OUT_OF_MEMORY, TaskDone
from lakh.corpus.task_progress import ProgressMarker, TaskProgress
from lakh.errors import LakhError

__all__ = ["work"]


def work(pipe: Connection, mark: ProgressMarker) -> None:
    """The life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the driver decides
    told_s = 0.0  # of processor time; the first task answers for the start as well
    while True:
        try:
            task, argument, number, careful, skipped = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            result = task(argument, number, TaskProgress(pipe.send, mark, careful=careful, skipped=skipped))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            spent_s = _cpu_seconds()
            answer: Any = TaskDone(number, result, spent_s - told_s, peak)
            told_s = spent_s
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except LakhError as error:
            answer = ("lakh", error.as_dict())
        except Exception:  # noqa: BLE001 - a bug of ours: the driver shows it
            answer = ("bug", traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:  # the driver is gone
            return


def _cpu_seconds() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))


class _ModuleBlocker:
    """No such module: pyarrow and numba import these where they are installed, half a second for what nobody uses."""

    NAMES = frozenset({"pandas", "scipy"})

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self.NAMES:
            raise ModuleNotFoundError(name)


if __name__ == "__main__":
    sys.meta_path.insert(0, _ModuleBlocker())
    # Of its own data, which is what grows: code and files that are mapped are shared with everybody.
    limits = [int(sys.argv[3]), resource.getrlimit(resource.RLIMIT_DATA)[1]]
    memory_bytes = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    work(Connection(int(sys.argv[1])), ProgressMarker(int(sys.argv[2])))
