"""One run as the control room sees it: folds records in, gives plain data out.

Knows the meaning of events; knows nothing of HTTP or of drawing. Steps and times are those that rank 0 tells; what
other ranks tell goes to the list of the unusual.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lakh import storage
from lakh.errors import LakhError
from lakh.goodput import GoodputAccount
from lakh.loss_spikes import SpikeDetector
from lakh.room import state, unusual
from lakh.room.curves import Sparse, curve, ordained, thinned
from lakh.room.goodput_timeline import goodput_timeline
from lakh.room.table import StepTable, number
from lakh.room.tail import Record, Replaced, Tails

__all__ = ["Watched"]

MOST_TOLD = 500
MOST_MARKS = 400
MOST_RANKS = 8
RATES = ("tokens_per_s", "mfu")
CLOCK_PARTS = 120
RECENT_STEPS = 50
CURVES = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "step_s")


class Watched:
    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.changes = 0
        """Grows whenever there is something new to show."""
        self._settings: dict[str, Any] = {}
        self._settings_read: tuple[int, int] | None = None
        self._begin()

    def _begin(self) -> None:
        self._tails = Tails(self.path)
        self._table = StepTable()
        self._goodput = GoodputAccount()
        self._spikes = SpikeDetector()
        self._told: list[Record] = []
        self._marks: list[Record] = []
        self._heldout: dict[int, Record] = {}
        self._memory: list[tuple[float, float, float]] = []
        self._scores: dict[str, dict[int, Record]] = {}
        self._measured: dict[str, dict[int, Record]] = {}
        self._started: Record | None = None
        self._ended: str | None = None
        self._step = 0
        self._restarts = 0
        self._lost_ranks = 0
        self.counts: dict[str, int] = {}
        self._checkpoints = Sparse()

    @property
    def last_s(self) -> float:
        """When the run last said something; 0 where it never did."""
        return self._goodput.last_s or 0.0

    # --- in ---

    def refresh(self, budget_s: float = 0.5) -> bool:
        """Read on for about `budget_s` seconds; whether there is more to read."""
        self._read_settings()
        try:
            records, more = self._tails.new_records(budget_s)
        except Replaced:
            self._begin()
            self.changes += 1
            return True
        for record in records:
            self._fold(record)
        self.changes += bool(records)
        return more

    def _fold(self, record: Record) -> None:
        kind, rank = record["kind"], record.get("rank", 0)
        record.setdefault("step", 0)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if rank == 0:
            self._goodput.add(record)
        if kind == "step_done":
            self._fold_step(record)
        elif kind == "evaluated":
            self._heldout[record["step"]] = record
        elif kind == "resources" and rank == 0:
            self._memory.append((record["step"], record["time_s"], number(record.get("memory_bytes"))))
        elif kind == "scored":
            self._scores.setdefault(str(record.get("task")), {})[record["step"]] = record
        elif kind == "measured" and isinstance(record.get("values"), dict):
            values = record["values"]
            bounds = {key: values[key] for key in ("low", "high")} if {"low", "high"} < values.keys() else {}
            for name in values.keys() - bounds:
                named = f"{record.get('hook')}: {name}"
                self._measured.setdefault(named, {})[record["step"]] = {**record, "value": values[name], **bounds}
        elif kind == "checkpoint_saved" and rank == 0:
            self._checkpoints.append(record["step"], record["time_s"])
        else:
            self._fold_rare(record, kind, rank)

    def _fold_step(self, record: Record) -> None:
        self._step = record["step"]
        self._ended = None
        self._table.append(record)
        for name, reason in (
            ("loss", self._spikes.check_loss(number(record.get("loss")))),
            ("gradient norm", self._spikes.check_grad_norm(number(record.get("grad_norm")))),
        ):
            if reason is not None:
                self._tell(record, unusual.WARNING, reason, kind=f"spike of {name}")

    def _fold_rare(self, record: Record, kind: str, rank: int) -> None:
        if kind == "rewound" and isinstance(record.get("to_step"), int):
            self._table.go_back(record["to_step"])
        elif kind == "run_started" and rank == 0:
            self._started, self._ended = record, None
            if record["step"] < self._table.last_step:
                self._table.go_back(record["step"])
        elif kind == "run_ended" and rank == 0:
            self._ended = str(record.get("reason", ""))
        elif kind == "restarted":
            self._restarts += 1
        elif kind == "ranks_lost" and rank == 0:
            self._lost_ranks += len(record.get("lost") or ())
        said = unusual.sentence(record)
        if said is not None and (rank == 0 or kind not in ("run_started", "run_ended")):
            self._tell(record, *said, kind=kind)

    def _tell(self, record: Record, weight: str, words: str, *, kind: str) -> None:
        """Add a sentence; what several ranks say of one step, and a spike of many steps, is one."""
        step, rank = record["step"] or self._step, record.get("rank", 0)
        if self._told:
            last = self._told[-1]
            same = last["kind"] == kind and last["last_step"] in (step, step - 1)
            if same and (kind.startswith("spike") or last["text"] == words):
                last["last_step"], last["times"] = step, last["times"] + 1
                last["ranks"].add(rank)
                return
        told = {"time_s": record["time_s"], "step": step, "last_step": step, "ranks": {rank}, "times": 1,
                "kind": kind, "weight": weight, "text": words}  # fmt: skip
        self._told = [*self._told[1 - MOST_TOLD :], told]
        if weight != unusual.NOTE:
            self._mark({**record, "step": step}, weight, words)

    def _mark(self, record: Record, what: str, words: str) -> None:
        mark = {"time_s": record["time_s"], "step": record["step"], "what": what, "text": words}
        self._marks = [*self._marks[1 - MOST_MARKS :], mark]

    def _read_settings(self) -> None:
        path = self.path / "run.toml"
        try:
            found = path.stat()
            if self._settings_read == (found.st_mtime_ns, found.st_size):
                return
            self._settings = tomllib.loads(storage.read_bytes(path).decode())
            self._settings_read = (found.st_mtime_ns, found.st_size)
            self.changes += 1
        except (OSError, ValueError, LakhError):  # none, or not one that we can read: the page does without
            return

    def _setting(self, section: str, name: str) -> Any:
        table = self._settings.get(section)
        return table.get(name) if isinstance(table, dict) else None

    # --- out ---

    def data(self, now_s: float, *, points: int, window: tuple[float, float] | None = None) -> dict[str, Any]:
        """All there is to show, curves thinned to about so many points, within a window of steps where one is given."""
        return {
            **self.brief(now_s),
            "curves": self._curves(points, window),
            "marks": self._marks,
            "checkpoints_at": self._checkpoints.points(),
            "scores": {
                task: [_score(found[step]) for step in sorted(found)] for task, found in sorted(self._scores.items())
            },
            "unusual": [
                {**told, "ranks": sorted(told["ranks"])[:MOST_RANKS], "num_ranks": len(told["ranks"])}
                for told in reversed(self._told)
            ],
            "clock": self._clock(),
            "read": {
                "events": sum(self.counts.values()),
                "by_kind": self.counts,
                "unreadable_lines": self._tails.unreadable,
                "files": self._tails.files,
                "bytes": self._tails.read_bytes,
                "of_bytes": self._tails.size_bytes,
            },
        }

    def brief(self, now_s: float) -> dict[str, Any]:
        """Where the run stands: what a line of a table can hold."""
        table, spent = self._table, self._goodput.seconds()
        step_s = _recent(table, "step_s") or 0.0
        steps = self._setting("train", "steps")
        steps = steps if isinstance(steps, int) else None
        total_s, ratio = sum(spent.values()), None
        stepping_s = spent["productive"] + spent["data_wait"] + spent["lost"]
        if total_s:
            ratio = spent["productive"] / total_s
        found = state.judge(
            now_s=now_s, last_s=self._goodput.last_s, step=self._step, steps=steps, step_s=step_s, ended=self._ended
        )
        started = self._started or {}
        live = found.word in ("running", "starting")
        return {
            "name": self.name,
            "path": str(self.path),
            "state": {"word": found.word, "reason": found.reason},
            "step": self._step,
            "steps": steps,
            "loss": _last(table, "loss"),
            "heldout_loss": number(self._heldout[max(self._heldout)].get("loss")) if self._heldout else None,
            "tokens": _last(table, "tokens"),
            "tokens_per_s": _recent(table, "tokens_per_s"),
            "mfu": _recent(table, "mfu"),
            "step_s": step_s or None,
            "data_wait": _share(_recent(table, "data_wait_s"), step_s),
            "memory_bytes": max((row[2] for row in self._memory), default=None),
            "left_s": state.seconds_left(
                step=self._step, steps=steps, step_s=step_s, overhead=total_s / stepping_s if stepping_s else 1.0
            )
            if live
            else None,
            "began_s": self._goodput.first_s,
            "last_s": self._goodput.last_s,
            "goodput": ratio,
            "spent_s": spent,
            "checkpoints_saved": self.counts.get("checkpoint_saved", 0),
            "restarts": self._restarts,
            "lost_ranks": self._lost_ranks,
            "facts": {
                "run": self._settings.get("name"),
                "parameters": started.get("parameters"),
                "ranks": started.get("world"),
                "device": started.get("device"),
                "backend": started.get("backend"),
                "attempt": started.get("attempt"),
            },
        }

    def _curves(self, points: int, window: tuple[float, float] | None) -> dict[str, Any]:
        table = self._table
        steps, times = table.column("step"), table.column("time_s")
        inside = np.ones(len(steps), dtype=bool)
        if window is not None:
            inside = (steps >= window[0]) & (steps <= window[1])
        current = table.current & inside
        found: dict[str, Any] = {}
        for name in CURVES:
            values = table.column(name)
            if np.isfinite(values[current]).any():
                shown = steps[current], times[current], values[current], points
                found[name] = ordained(*shown) if name == "lr" else curve(*shown, rate=name in RATES)
        share = table.column("data_wait_s") / np.maximum(table.column("step_s"), 1e-9)
        if np.isfinite(share[current]).any():
            found["data_wait"] = curve(steps[current], times[current], share[current], points)
        gone = ~table.current & inside
        if gone.any():
            found["lost_loss"] = thinned(steps[gone], times[gone], table.column("loss")[gone], points // 2)
        for name, rows in (("heldout", self._heldout), *self._measured.items()):
            chosen = [rows[step] for step in sorted(rows) if window is None or window[0] <= step <= window[1]]
            if chosen:
                told = [(row["step"], row["time_s"], number(row.get("value", row.get("loss")))) for row in chosen]
                steps, times, values = np.array(told, dtype=float).T
                found[name] = thinned(steps, times, values, points)
                if "low" in chosen[-1] and len(found[name]["value"]) == len(chosen):
                    found[name] |= {key: [_or_none(row.get(key)) for row in chosen] for key in ("low", "high")}
        memory = [row for row in self._memory if window is None or window[0] <= row[0] <= window[1]]
        if memory:
            steps, times, values = np.array(memory, dtype=float).T
            found["memory_bytes"] = thinned(steps, times, values, points)
        return found

    def _clock(self) -> dict[str, Any]:
        edges, shares = goodput_timeline(self._goodput, CLOCK_PARTS)
        rounded = {name: [round(share, 4) for share in column] for name, column in shares.items()}
        return {"began_s": edges[0], "ended_s": edges[-1], "shares": rounded} if edges else {}


def _score(record: Record) -> dict[str, Any]:
    named = ("step", "time_s", "pass_at_1", "low", "high", "passed", "total", "seconds")
    return {name: record.get(name) for name in named}


def _finite(table: StepTable, name: str) -> NDArray[np.float64]:
    values = table.column(name)[-RECENT_STEPS:]
    return values[np.isfinite(values)]


def _recent(table: StepTable, name: str) -> float | None:
    """The median of the last steps: one slow step does not make a slow run."""
    values = _finite(table, name)
    return float(np.median(values)) if len(values) else None


def _last(table: StepTable, name: str) -> float | None:
    values = _finite(table, name)
    return float(values[-1]) if len(values) else None


def _or_none(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def _share(part: float | None, whole: float) -> float | None:
    return min(1.0, part / whole) if part is not None and whole else None
