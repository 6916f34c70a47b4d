"""Stopping on request and breaking on purpose.

`StopRequest` turns SIGTERM and SIGINT into a wish that the loop grants at the end of a step: checkpoint, then exit 75.
`inject_faults` carries out the faults that were ordered for this rank and step.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from types import FrameType

from lakh.errors import LakhError
from lakh.events import FaultInjected
from lakh.spec import Fault

__all__ = ["StopRequest", "inject_faults"]


class StopRequest:
    """Whether somebody asked this process to stop. A second SIGINT stops it at once."""

    def __init__(self) -> None:
        self.signal = ""

    @property
    def is_made(self) -> bool:
        return bool(self.signal)

    @contextlib.contextmanager
    def listen(self) -> Iterator[StopRequest]:
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_made and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name


def inject_faults(faults: Sequence[Fault], *, rank: int, step: int, log: EventLog) -> None:
    """Do to this process what was ordered for it. The event is on disk before the blow falls."""
    for fault in faults:
        if (fault.rank, fault.step) != (rank, step):
            continue
        log.write(FaultInjected(step=step, fault=str(fault)))
        log.close()
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise LakhError(f"rank {rank}, step {step}", f"the fault {fault} was ordered", "this is what was asked for")
