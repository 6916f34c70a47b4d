"""Per-step measurements in growing columns, and which steps were kept.

After a restart or a rewind the run repeats steps; the earlier attempts of these steps count as lost. Appending is a
list operation; columns become arrays on access.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["COLUMNS", "StepTable", "number"]

COLUMNS = ("step", "time_s", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s", "data_wait_s", "mfu")
STEP = COLUMNS.index("step")
all_columns = operator.itemgetter(*COLUMNS)


class StepTable:
    def __init__(self) -> None:
        self._rows = np.empty((1024, len(COLUMNS)))
        self._kept = np.empty(1024, dtype=bool)
        self._count = 0
        self._new: list[tuple[Any, ...]] = []
        self.last_step = -1

    def __len__(self) -> int:
        return self._count + len(self._new)

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
        rows, kept = self.rows, self._kept[: self._count]
        kept &= rows[:, STEP] <= to_step
        self.last_step = to_step

    @property
    def rows(self) -> NDArray[np.float64]:
        self._flush()
        return self._rows[: self._count]

    @property
    def current(self) -> NDArray[np.bool_]:
        """Mask of the rows that were not repeated later; includes skipped steps."""
        self._flush()
        return self._kept[: self._count].copy()

    def column(self, name: str) -> NDArray[np.float64]:
        return self.rows[:, COLUMNS.index(name)]

    def _flush(self) -> None:
        if not self._new:
            return
        needed = self._count + len(self._new)
        if needed > len(self._rows):
            size = max(needed, 2 * len(self._rows))
            rows, kept = np.empty((size, len(COLUMNS))), np.empty(size, dtype=bool)
            rows[: self._count], kept[: self._count] = self._rows[: self._count], self._kept[: self._count]
            self._rows, self._kept = rows, kept
        try:
            self._rows[self._count : needed] = self._new  # None becomes NaN
        except (TypeError, ValueError):
            self._rows[self._count : needed] = [tuple(map(number, row)) for row in self._new]
        self._kept[self._count : needed] = True
        self._count = needed
        self._new = []


def number(value: Any) -> float:
    """The value as a float; NaN for anything that is not a number, so a malformed record does not stop the page."""
    return float(value) if isinstance(value, int | float) else math.nan
