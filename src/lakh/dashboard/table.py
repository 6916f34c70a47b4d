"""Per-step measurements in growing columns, and which steps were kept.

After a restart or a rewind the run repeats steps; the earlier attempts of these steps count as lost. New rows are kept
in a list and become part of the array on access.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lakh.dashboard.numbers import MOST

__all__ = ["COLUMNS", "StepTable", "number"]

COLUMNS = ("step", "time_s", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s", "data_wait_s", "mfu")
RECENT_STEPS = 50
all_columns = operator.itemgetter(*COLUMNS)


class StepTable:
    def __init__(self) -> None:
        self._rows = np.empty((0, len(COLUMNS)))
        self._kept = np.empty(0, dtype=bool)
        self._new: list[tuple[Any, ...]] = []
        self.last_step = -1

    def append(self, record: dict[str, Any]) -> None:
        step = record["step"]
        if step <= self.last_step:
            self.go_back(step - 1)
        try:
            self._new.append(all_columns(record))
        except KeyError:  # written by another version
            self._new.append(tuple(record.get(name) for name in COLUMNS))
        self.last_step = step

    def go_back(self, to_step: int) -> None:
        """Mark every step after `to_step` as lost."""
        steps = self.column("step")
        self._kept &= steps <= to_step
        self.last_step = to_step

    @property
    def current(self) -> NDArray[np.bool_]:
        """Mask of the rows that were not repeated later; includes skipped steps."""
        self._flush()
        return self._kept.copy()

    def column(self, name: str) -> NDArray[np.float64]:
        self._flush()
        return self._rows[:, COLUMNS.index(name)]

    def recent(self, name: str) -> NDArray[np.float64]:
        """The finite values of the last steps."""
        values = self.column(name)[-RECENT_STEPS:]
        return values[np.isfinite(values)]

    def _flush(self) -> None:
        if not self._new:
            return
        try:
            new = np.array(self._new, dtype=float)  # None becomes NaN
        except (TypeError, ValueError, OverflowError):
            new = np.array([tuple(map(number, row)) for row in self._new])
        self._rows = np.concatenate([self._rows, new])
        self._kept = np.concatenate([self._kept, np.ones(len(new), dtype=bool)])
        self._new = []


def number(value: Any) -> float:
    """The value as a float; NaN for anything that is not a number, so a malformed record does not stop the page."""
    return float(value) if isinstance(value, int | float) and not abs(value) >= MOST else math.nan
