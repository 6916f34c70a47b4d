"""What Ctrl-C does: an exception in a command's own code, the quiet end of the process while modules are imported.

An import may turn the exception into another one, and leaves modules half initialised.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["end_on_interrupt", "raise_on_interrupt"]


@contextlib.contextmanager
def raise_on_interrupt() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt inside the block."""
    with _replaced(signal.SIG_DFL, signal.default_int_handler):
        yield


@contextlib.contextmanager
def end_on_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process inside the block."""
    with _replaced(signal.default_int_handler, signal.SIG_DFL):
        yield


@contextlib.contextmanager
def _replaced(before: Any, handler: Any) -> Iterator[None]:
    """Another handler takes the place of `before`; those of applications stay."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not before:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
