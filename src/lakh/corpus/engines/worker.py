"""One worker process of the local engine: tasks from a socket, until it closes.

Started by workers.py as `python -m lakh.corpus.engines.worker DESCRIPTOR`. Says ticks and `Done`, or what went wrong.
"""

from __future__ import annotations

import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from lakh.corpus.engines.workers import Done
from lakh.errors import LakhError

__all__ = ["work"]


def work(pipe: Connection) -> None:
    """The life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the driver decides
    while True:
        try:
            task, argument, number = pipe.recv()
        except (EOFError, OSError):
            return
        before = _cpu_seconds()
        try:
            result = task(argument, number, pipe.send)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            answer: Any = Done(number, result, _cpu_seconds() - before, peak)
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


if __name__ == "__main__":
    work(Connection(int(sys.argv[1])))
