"""What Ctrl-C and SIGTERM do: an exception in a command's own code, so that it removes what is incomplete, and the end
of the process while modules are imported.

An import may turn the exception into another one, and leaves modules half initialised.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Terminated", "end_on_interrupt", "raise_on_interrupt"]


class Terminated(KeyboardInterrupt):
    """SIGTERM: a scheduler, `timeout` or `kill` asked to stop."""


def _terminate(number: int, frame: object) -> None:
    raise Terminated


_RAISING: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _terminate}
_ENDING: dict[int, Any] = {signal.SIGINT: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL}


@contextlib.contextmanager
def raise_on_interrupt() -> Iterator[None]:
    """Inside the block Ctrl-C raises KeyboardInterrupt, and SIGTERM Terminated."""
    with _replaced(_ENDING, _RAISING):
        yield


@contextlib.contextmanager
def end_on_interrupt() -> Iterator[None]:
    """Inside the block Ctrl-C and SIGTERM end the process."""
    with _replaced(_RAISING, _ENDING):
        yield


@contextlib.contextmanager
def _replaced(before: Mapping[int, Any], after: Mapping[int, Any]) -> Iterator[None]:
    """Other handlers take the places of those `before`; those of applications stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    changed = [number for number in before if signal.getsignal(number) is before[number]]
    for number in changed:
        signal.signal(number, after[number])
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])
