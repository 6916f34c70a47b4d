"""The extreme steps of a run in a small file beside its events, so that a run of a million steps opens at once.

    events/extremes-00000.jsonl     step_done lines of rank 0, copied: of every BLOCK_STEPS steps the first, the last,
                                    and those with the minimum and the maximum of each curve

About two percent of the events. A reader that needs every step reads the event files; this one is a shortcut, so an
error while writing it is ignored. After a crash the last block is missing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["EXTREMES", "StepExtremes"]

EXTREMES = "extremes-00000.jsonl"
BLOCK_STEPS = 512
CURVES = ("loss", "grad_norm", "tokens_per_s", "step_s", "data_wait_s", "mfu")


class StepExtremes:
    """Copies the extreme ones of the steps that are added, in their order."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EXTREMES
        self._begin_block()

    def _begin_block(self) -> None:
        self._lines: dict[int, bytes] = {}
        self._count = 0
        self._low = dict.fromkeys(CURVES, (math.inf, 0))
        self._high = dict.fromkeys(CURVES, (-math.inf, 0))
        """Curve -> its extreme value so far, and the number of the step in this block."""

    def add(self, record: Mapping[str, Any], line: bytes) -> None:
        """A step_done record and its line, with the line break."""
        number, is_extreme = self._count, self._count == 0
        for name in CURVES:
            value = record.get(name)
            if value is None:
                continue
            if value < self._low[name][0]:
                self._low[name], is_extreme = (value, number), True
            # A value that is not a number is the highest: it must stay visible.
            if (value > self._high[name][0]) or (value != value and math.isfinite(self._high[name][0])):
                self._high[name], is_extreme = (math.inf if value != value else value, number), True
        if is_extreme:
            self._lines[number] = line
        self._last = line
        self._count += 1
        if self._count == BLOCK_STEPS:
            self.flush()

    def flush(self) -> None:
        """Write the block so far, and begin the next one."""
        if self._count:
            chosen = {0, *(number for table in (self._low, self._high) for _, number in table.values())}
            lines = [self._lines[number] for number in sorted(chosen)]
            if self._count - 1 not in chosen:
                lines.append(self._last)
            with contextlib.suppress(OSError), self._path.open("ab") as file:
                file.write(b"".join(lines))
        self._begin_block()
