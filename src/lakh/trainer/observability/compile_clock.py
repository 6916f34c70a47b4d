"""Seconds that torch.compile has spent, by the callbacks of TorchDynamo.

TorchDynamo is not imported for this: a run that compiles has imported it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["CompileClock"]


class CompileClock:
    """Counts compilations from `attach` on; `lap` returns the seconds since the last call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = self._total_s = 0.0
        self._handler: Any = None

    def attach(self) -> None:
        """Listen to TorchDynamo, if the run has imported it. Nested compilations count once."""
        if self._handler is None and "torch._dynamo" in sys.modules:
            from torch._dynamo.callback import callback_handler

            self._handler = callback_handler
            self._handler.register_start_callback(self._start)
            self._handler.register_end_callback(self._end)

    def detach(self) -> None:
        if self._handler is not None:
            self._handler.remove_start_callback(self._start)
            self._handler.remove_end_callback(self._end)
            self._handler = None

    def lap(self) -> float:
        total_s, self._total_s = self._total_s, 0.0
        return total_s

    def _start(self, _: Any) -> None:
        self._began_s = self._clock()

    def _end(self, _: Any) -> None:
        self._total_s += self._clock() - self._began_s
