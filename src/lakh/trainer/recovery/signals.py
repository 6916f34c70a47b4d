"""Stop requests by signals, and injected faults."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence

from lakh.errors import LakhError
from lakh.events import EventLog, FaultInjected
from lakh.spec import Fault
from lakh.trainer.launch.restart_plan import note_lost_device

__all__ = ["StopRequest", "handle_stop_signals", "inject_faults", "stop_cause"]


@contextlib.contextmanager
def handle_stop_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` with the number of each SIGTERM and SIGINT inside the block, instead of ending the process."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, frame: handle(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_cause(number: int) -> str:
    """A stop signal as people know it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class StopRequest:
    """SIGTERM or SIGINT: the loop saves a checkpoint after the step and exits. A second SIGINT exits at once."""

    def __init__(self) -> None:
        self.cause = ""
        """What asked to stop: SIGTERM, or Ctrl-C."""

    @property
    def is_made(self) -> bool:
        return bool(self.cause)

    @contextlib.contextmanager
    def listen(self) -> Iterator[StopRequest]:
        with handle_stop_signals(self._handle):
            yield self

    def _handle(self, number: int) -> None:
        if self.is_made and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.cause = stop_cause(number)


def inject_faults(faults: Sequence[Fault], *, rank: int, step: int, log: EventLog) -> None:
    """Inject the faults of this rank and step. The event is on disk before the fault happens."""
    for fault in faults:
        if (fault.rank, fault.step) != (rank, step):
            continue
        log.write(FaultInjected(step=step, fault=str(fault)))
        log.close()
        if fault.kind == "lose" and (rendezvous := os.environ.get("LAKH_RENDEZVOUS")):
            note_lost_device(rendezvous, int(os.environ.get("LOCAL_RANK", "0")))
        if fault.kind in ("kill", "lose"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise LakhError(f"rank {rank}, step {step}", f"the fault {fault} was injected", "remove --fault")
