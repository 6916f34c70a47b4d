"""Time accounting of a run: seconds by class, as totals and over time.

    productive    kept steps, without their wait for data
    data_wait     waiting for data inside kept steps
    lost          steps that were repeated after a restart or a rewind, or skipped
    evaluation, checkpoint, init
    down          between the last event of an attempt and the start of the next
    other         the remainder: the classes sum to the total by construction

A test compares the totals with the trainer's goodput. Here events arrive incrementally, and steps count as lost as soon
as the run goes back, not only once they are repeated. The clock of rank 0 counts for all ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lakh.dashboard.table import StepTable, number

__all__ = ["CLASSES", "TimeAccounting"]

CLASSES = ("productive", "data_wait", "lost", "evaluation", "checkpoint", "init", "down", "other")
BEFORE_INITIALISED = ("restarted", "setting_changed", "checkpoint_skipped")
CLASS_OF_KIND = {"evaluated": "evaluation", "checkpoint_saved": "checkpoint"}
Span = tuple[float, float]


class TimeAccounting:
    """Consumes the records of rank 0 in order of time; the steps themselves are in the table."""

    def __init__(self, table: StepTable) -> None:
        self._table = table
        self._spans: dict[str, list[Span]] = {name: [] for name in CLASSES}
        self.first_s: float | None = None
        self.last_s: float | None = None

    def add(self, record: dict[str, Any]) -> None:
        kind, time_s = record["kind"], float(record["time_s"])
        if kind in BEFORE_INITIALISED:
            return  # part of the next attempt, which begins with its `initialised` event
        if kind == "initialised":
            began_s = time_s - max(0.0, number(record.get("seconds")))
            if self.last_s is not None and began_s > self.last_s:
                self._spans["down"].append((self.last_s, began_s))
            self._spans["init"].append((began_s, time_s))
            self.first_s = began_s if self.first_s is None else self.first_s
        elif kind in CLASS_OF_KIND:
            seconds = number(record.get("seconds"))
            self._spans[CLASS_OF_KIND[kind]].append((time_s - seconds, time_s))
        if self.first_s is None:
            self.first_s = time_s
        self.last_s = time_s

    def seconds(self) -> dict[str, float]:
        """Seconds by class; they sum to the total."""
        found = {name: sum(end - start for start, end in self._spans_of(name)) for name in CLASSES}
        kept, step_s, wait_s = self._steps()
        found["productive"] = float((step_s - wait_s)[kept].sum())
        found["data_wait"] = float(wait_s[kept].sum())
        found["lost"] = float(step_s[~kept].sum())
        known_s = sum(found.values())
        total_s = max(known_s, (self.last_s or 0.0) - (self.first_s or 0.0))
        found["other"] = total_s - known_s
        return found

    def over_time(self, buckets: int) -> tuple[list[float], dict[str, list[float]]]:
        """The edges of equal time intervals, and the share of every class in each interval; shares sum to one."""
        if self.first_s is None or self.last_s is None or self.last_s <= self.first_s:
            return [], {}
        edges = np.linspace(self.first_s, self.last_s, buckets + 1)
        width_s = (self.last_s - self.first_s) / buckets
        kept, step_s, wait_s = self._steps()
        ends = self._table.column("time_s")
        starts = ends - step_s
        spans = {name: np.array(self._spans_of(name), dtype=float).reshape(-1, 2) for name in CLASSES}
        spans["productive"] = np.stack([starts + wait_s, ends], axis=1)[kept]
        spans["data_wait"] = np.stack([starts, starts + wait_s], axis=1)[kept]
        spans["lost"] = np.stack([starts, ends], axis=1)[~kept]
        shares = {name: np.diff(_seconds_before(edges, spans[name])) / width_s for name in CLASSES}
        known = sum(shares.values())
        shares["other"] = np.maximum(0.0, 1.0 - known)
        scale = np.maximum(1.0, known)  # spans may overlap a little: normalise
        return edges.tolist(), {name: (share / scale).tolist() for name, share in shares.items()}

    def _steps(self) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]]:
        step_s = np.maximum(0.0, np.nan_to_num(self._table.column("step_s")))
        wait_s = np.clip(np.nan_to_num(self._table.column("data_wait_s")), 0.0, step_s)
        return self._table.kept, step_s, wait_s

    def _spans_of(self, name: str) -> list[Span]:
        return [span for span in self._spans[name] if span[1] > span[0]]


def _seconds_before(edges: NDArray[np.float64], spans: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of the spans that lie before each edge."""
    if not len(spans):
        return np.zeros(len(edges))
    knots = np.concatenate([spans[:, 0], spans[:, 1]])
    slopes = np.concatenate([np.ones(len(spans)), -np.ones(len(spans))])
    order = np.argsort(knots, kind="stable")
    knots, open_spans = knots[order], np.cumsum(slopes[order])
    before = np.concatenate([[0.0], np.cumsum(np.diff(knots) * open_spans[:-1])])
    return np.interp(edges, knots, before)
