"""The state of one run: consumes event records, returns plain data for the page.

Steps and times are those of rank 0; other ranks contribute notable events only.
"""

from __future__ import annotations

import stat
import time
import tomllib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lakh import storage
from lakh.dashboard import notable, state
from lakh.dashboard.curves import curve, downsampled, exact_curve, goodput_timeline
from lakh.dashboard.fleet import Fleet, health_findings, link_map
from lakh.dashboard.interruptions import InterruptionLog
from lakh.dashboard.preview import RunPreview, preview_run
from lakh.dashboard.records import clean_record
from lakh.dashboard.run_files.evaluations import find_evaluations, read_samples
from lakh.dashboard.run_files.tags import read_tags
from lakh.dashboard.run_files.training_data import training_data
from lakh.dashboard.slow_steps import SlowStepDetector
from lakh.dashboard.table import StepTable, number
from lakh.errors import LakhError
from lakh.events import EventFilesReplaced, Record, RunEventTail
from lakh.events.log import FOLDER
from lakh.goodput import STEP_PARTS, GoodputAccount
from lakh.loss_spikes import SpikeDetector

__all__ = ["RunView"]

MAX_NOTABLE = 500
MAX_MARKS = 400
MAX_MARKERS = 512  # checkpoints
MAX_RANKS = 8
MAX_WORLD = 1 << 20
MAX_TEXT = 400
MAX_SETTINGS_BYTES = 1 << 20
RATES = ("tokens_per_s", "mfu")
TIMELINE_PARTS = 120
LOOK_FOR_FILES_EVERY_S = 5.0
RECORDS_AT_ONCE = 512
MAX_WAITING_RECORDS = 16_384
SPARKLINE_POINTS = 32
SCORE_KEYS = ("step", "time_s", "pass_at_1", "low", "high", "passed", "total", "seconds")
PREDICTION_KEYS = ("step_s", "low_s", "high_s", "basis")
CURVES = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "step_s")


class RunView:
    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.changes = 0
        """Increases whenever there is something new to show."""
        self._settings: dict[str, Any] = {}
        self._settings_read: tuple[int, int] | None = None
        self._files: dict[str, Any] = {"evaluations": [], "training_data": None, "health": [], "links": None}
        self._tags: list[str] = []
        self._files_read_s = -LOOK_FOR_FILES_EVERY_S
        self._reset()

    def _reset(self) -> None:
        self._tail = RunEventTail(self.path)
        self._preview: RunPreview | None = None
        self._is_new = True
        self._waiting: deque[Record] = deque()
        self._table = StepTable()
        self._goodput = GoodputAccount()
        self._interruptions = InterruptionLog()
        self._fleet = Fleet()
        self._spikes = SpikeDetector()
        self._slow_steps = SlowStepDetector()
        self._notable: list[Record] = []
        self._marks: list[Record] = []
        self._scores: dict[str, dict[int, Record]] = {}
        self._measured: dict[str, dict[int, Record]] = {}
        """Name of a curve -> step -> the record of its last measurement, with its `value`."""
        self._predicted: Record | None = None
        self._started: Record | None = None
        self._begun_ranks: int | None = None
        """Ranks of the first attempt; `_started` has those of the last."""
        self._last_s: float | None = None
        self._ended: str | None = None
        self._step = 0
        self._restarts = 0
        self._lost_ranks = 0
        """Those that did not join again."""
        self._losses = 0
        self.counts: dict[str, int] = {}
        self._refused = 0
        """Records without a usable time, rank, step or kind."""
        self._checkpoints: list[tuple[float, float]] = []
        """(step, time_s)"""

    @property
    def last_s(self) -> float:
        """Time of the last event; 0 if there is none."""
        return (self._preview.last_s if self._preview else self._last_s) or 0.0

    def refresh(self, budget_s: float = 0.5) -> bool:
        """Read new events for about `budget_s` seconds; True if there is more to read."""
        self._read_settings()
        self._look_for_files()
        if self._is_new:
            self._preview, self._is_new = preview_run(self.path), False
        unreadable = self._tail.unreadable
        try:
            more = self._read(time.monotonic() + budget_s)
        except EventFilesReplaced:
            self._reset()
            self.changes += 1
            return True
        self.changes += self._tail.unreadable != unreadable
        if not more:
            self._preview = None
        return more

    def _read(self, deadline_s: float) -> bool:
        """Add records until the deadline; True if there may be more. Those that were read and not added wait."""
        more = True
        while more or self._waiting:
            if not self._waiting:
                records, more = self._tail.new_records(deadline_s - time.monotonic(), MAX_WAITING_RECORDS)
                self._waiting.extend(records)
            count = min(RECORDS_AT_ONCE, len(self._waiting))
            for _ in range(count):
                self._add(self._waiting.popleft())
            self.changes += count > 0
            if time.monotonic() > deadline_s:
                break
        return more or bool(self._waiting)

    def _add(self, found: Record) -> None:
        record = clean_record(found)
        if record is None:
            self._refused += 1
            return
        kind, rank = record["kind"], record["rank"]
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self._fleet.add(record)
        if rank == 0:
            self._last_s = max(self._last_s or 0.0, record["time_s"])
            self._goodput.add(record)
            self._interruptions.add(record)
        if kind == "step_done":
            self._add_step(record)
        elif kind == "evaluated":
            self._measure("heldout", record, record.get("loss"))
        elif kind == "resources" and rank == 0:
            self._measure("memory_bytes", record, record.get("memory_bytes"))
        elif kind == "expert_load":
            self._measure("experts: busiest over mean load", record, record.get("busiest"))
            self._measure("experts: idle", record, record.get("idle"))
        elif kind == "scored":
            self._scores.setdefault(str(record.get("task")), {})[record["step"]] = record
        elif kind == "hook_metrics" and isinstance(record.get("values"), dict):
            values = record["values"]
            bounds = {key: values[key] for key in ("low", "high")} if {"low", "high"} < values.keys() else {}
            for name in values.keys() - bounds:
                self._measure(f"{record.get('hook')}: {name}", record | bounds, values[name])
        elif kind == "step_predicted" and rank == 0:
            self._predicted = {name: record.get(name) for name in PREDICTION_KEYS}
        elif kind == "checkpoint_saved" and rank == 0:
            self._checkpoints.append((record["step"], record["time_s"]))
        else:
            self._add_rare(record, kind, rank)

    def _measure(self, name: str, record: Record, value: Any) -> None:
        self._measured.setdefault(name, {})[record["step"]] = {**record, "value": number(value)}

    def _add_step(self, record: Record) -> None:
        self._step = record["step"]
        self._ended = None
        self._table.append(record)
        for name, reason in (
            ("loss", self._spikes.check_loss(number(record.get("loss")))),
            ("gradient norm", self._spikes.check_grad_norm(number(record.get("grad_norm")))),
        ):
            if reason is not None:
                self._note(record, notable.WARNING, reason, kind=f"spike of {name}")
        slow = self._slow_steps.check(number(record.get("step_s")))
        if slow is not None:
            self._note(record, notable.WARNING, slow, kind="slow step")

    def _add_rare(self, record: Record, kind: str, rank: int) -> None:
        if kind == "rewound" and isinstance(record.get("to_step"), int):
            self._table.go_back(record["to_step"])
        elif kind == "run_started" and rank == 0:
            self._started, self._ended = record, None
            self._slow_steps.begin_attempt()
            if self._begun_ranks is None:
                self._begun_ranks = self._world()
            if record["step"] < self._table.last_step:
                self._table.go_back(record["step"])
        elif kind == "run_ended" and rank == 0:
            self._ended = str(record.get("reason", ""))
        elif kind == "restarted":
            self._restarts += 1
        elif kind == "ranks_lost" and rank == 0:
            self._losses += 1
            self._lost_ranks += len(record.get("lost") or ())
        elif kind == "ranks_joined" and rank == 0:
            self._lost_ranks = max(0, self._lost_ranks - len(record.get("joined") or ()))
        described = notable.describe(record)
        if described is not None and (rank == 0 or kind not in ("run_started", "run_ended")):
            self._note(record, *described, kind=kind)

    def _note(self, record: Record, severity: str, text: str, *, kind: str) -> None:
        """Add a notable event; equal events of several ranks and a spike over several steps are merged into one."""
        step, rank = record["step"] or self._step, record.get("rank", 0)
        if self._notable:
            last = self._notable[-1]
            same = last["kind"] == kind and last["last_step"] in (step, step - 1)
            if same and (kind.startswith("spike") or kind == "slow step" or last["text"] == text):
                last["last_step"], last["times"] = step, last["times"] + 1
                last["ranks"].add(rank)
                return
        entry = {"time_s": record["time_s"], "step": step, "last_step": step, "ranks": {rank}, "times": 1,
                "kind": kind, "weight": severity, "text": text}  # fmt: skip
        self._notable = [*self._notable[1 - MAX_NOTABLE :], entry]
        if severity != notable.NOTE:
            mark = {"time_s": record["time_s"], "step": step, "what": severity, "text": text}
            self._marks = [*self._marks[1 - MAX_MARKS :], mark]

    def _read_settings(self) -> None:
        path = self.path / "run.toml"
        try:
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_SETTINGS_BYTES:  # no link to elsewhere
                return
            if self._settings_read == (found.st_mtime_ns, found.st_size):
                return
            self._settings = tomllib.loads(storage.read_bytes(path).decode())
            self._settings_read = (found.st_mtime_ns, found.st_size)
            self.changes += 1
        except (OSError, ValueError, LakhError):  # missing or unreadable: the page works without it
            return

    def _look_for_files(self) -> None:
        """Evaluations and the origin of the training data, which change rarely."""
        if time.monotonic() - self._files_read_s < LOOK_FOR_FILES_EVERY_S:
            return
        self._files_read_s = time.monotonic()
        data = self._settings.get("data")
        tokens = data.get("tokens") if isinstance(data, dict) else None
        found = {
            "evaluations": find_evaluations(self.path),
            "training_data": training_data(tokens),
            "health": health_findings(self.path),
            "links": link_map(self.path),
        }
        tags = read_tags(self.path)
        self.changes += (found, tags) != (self._files, self._tags)
        self._files, self._tags = found, tags

    @property
    def corpus_path(self) -> str | None:
        corpus = (self._files["training_data"] or {}).get("corpus")
        return None if corpus is None else str(corpus["path"])

    def samples(self, evaluation: str) -> list[dict[str, Any]] | None:
        """The samples and verdicts of one of the evaluations; None if there is no such evaluation."""
        return read_samples(self.path, evaluation)

    def data(self, now_s: float, *, points: int, window: tuple[float, float] | None = None) -> dict[str, Any]:
        """Everything the page shows; curves have at most `points` points, within a window of steps if given."""
        progress = self._tail.progress()
        saved_at = self._checkpoints[:: -(-len(self._checkpoints) // MAX_MARKERS) or 1]
        return {
            **self.summary(now_s),
            "curves": self._curves(points, window),
            "marks": self._marks,
            "checkpoints_at": {"step": [step for step, _ in saved_at], "time_s": [time_s for _, time_s in saved_at]},
            "scores": {
                task: [{key: found[step].get(key) for key in SCORE_KEYS} for step in sorted(found)]
                for task, found in sorted(self._scores.items())
            },
            "unusual": self._entries(unusual=True),
            "history": self._entries(unusual=False),
            "settings": dict(_flat(self._settings)),
            **self._files,
            "clock": self._timeline(),
            "interruptions": self._interruptions.as_dicts(),
            "fleet": self._fleet.data(begun=self._begun_ranks, world=self._world(), settings=self._settings),
            "read": {
                **progress,
                "unreadable_lines": progress["unreadable_lines"] + self._refused,
                "unreadable_files": self._unreadable_files()[:MAX_RANKS],
                "events": sum(self.counts.values()),
                "by_kind": self.counts,
                "is_preview": self._preview is not None,
                "has_extremes": self._preview is not None and self._preview.has_extremes,
            },
        }

    def _unreadable_files(self) -> list[str]:
        """Which events cannot be read, and why."""
        return [
            f"cannot read {path}: {reason[:1].lower()}{reason[1:]}" for path, reason in self._tail.unreadable.items()
        ]

    def _unreadable_progress(self) -> str:
        """Empty if the events of rank 0 can be read, which say how far the run is."""
        first = next(iter(self._tail.unreadable), None)
        if first not in (self.path / FOLDER, self.path / FOLDER / "rank-00000.jsonl"):
            return ""
        return f"{self._unreadable_files()[0]}; check its owner and mode"

    def _world(self) -> int | None:
        world = (self._started or {}).get("world")
        return world if isinstance(world, int) and 0 < world <= MAX_WORLD else None

    def _entries(self, *, unusual: bool) -> list[Record]:
        """Notable events, newest first: the unusual ones, or the ordinary history of the run."""
        return [
            {**entry, "ranks": sorted(entry["ranks"])[:MAX_RANKS], "num_ranks": len(entry["ranks"])}
            for entry in reversed(self._notable)
            if (entry["weight"] != notable.NOTE) == unusual
        ]

    def summary(self, now_s: float) -> dict[str, Any]:
        """Progress and state of the run: one line of the table of runs."""
        preview, seconds = self._preview, self._goodput.seconds()
        table = preview.table if preview else self._table
        step, last_s, ended = self._step, self._last_s, self._ended
        if preview:
            step, last_s, ended = preview.step, preview.last_s, preview.ended
        step_s = _median(table, "step_s") or 0.0
        data_wait_s = _median(table, "data_wait_s")
        train = self._settings.get("train")
        steps = train.get("steps") if isinstance(train, dict) else None
        steps = steps if isinstance(steps, int) else None
        total_s = sum(seconds.values())
        stepping_s = sum(seconds[name] for name in ("productive", *STEP_PARTS, "lost"))
        heldout, memory = self._measured.get("heldout"), self._measured.get("memory_bytes", {})
        now = state.run_state(
            now_s=now_s,
            last_s=last_s,
            step=step,
            steps=steps,
            step_s=step_s,
            ended=ended,
            unreadable=self._unreadable_progress(),
        )
        left_s = None
        if now.word in ("running", "starting"):
            overhead = (total_s - seconds["restart"]) / stepping_s if stepping_s else 1.0
            left_s = state.seconds_left(step=step, steps=steps, step_s=step_s, overhead=overhead)
        started = self._started or {}
        return {
            "name": self.name,
            "path": str(self.path),
            "tags": self._tags,
            "state": {"word": now.word, "reason": now.reason},
            "step": step,
            "steps": steps,
            "loss": _last(table, "loss"),
            "sparkline": _sparkline(table),
            "heldout_loss": heldout[max(heldout)]["value"] if heldout else None,
            "tokens": _last(table, "tokens"),
            "tokens_per_s": _median(table, "tokens_per_s"),
            "mfu": _median(table, "mfu"),
            "step_s": step_s or None,
            "predicted": self._predicted,
            "data_wait": min(1.0, data_wait_s / step_s) if data_wait_s is not None and step_s else None,
            "memory_bytes": max((record["value"] for record in memory.values()), default=None),
            "left_s": left_s,
            "began_s": self._goodput.first_s,
            "last_s": last_s,
            "goodput": seconds["productive"] / total_s if total_s else None,
            "spent_s": seconds,
            "checkpoints_saved": self.counts.get("checkpoint_saved", 0),
            "restarts": self._restarts,
            "losses": self._losses,
            "lost_ranks": self._lost_ranks,
            "facts": {
                "run": self._settings.get("name"),
                "ranks": self._begun_ranks,
                "ranks_now": started.get("world"),
                **{name: started.get(name) for name in ("parameters", "device", "backend", "attempt")},
            },
        }

    def _curves(self, points: int, window: tuple[float, float] | None) -> dict[str, Any]:
        table = self._preview.table if self._preview else self._table
        steps, times = table.column("step"), table.column("time_s")
        first, last = window or (-np.inf, np.inf)
        inside = (steps >= first) & (steps <= last)
        current = table.current & inside
        found: dict[str, Any] = {}
        columns = {name: table.column(name) for name in CURVES}
        columns["data_wait"] = table.column("data_wait_s") / np.maximum(table.column("step_s"), 1e-9)
        for name, values in columns.items():
            if np.isfinite(values[current]).any():
                shown = steps[current], times[current], values[current], points
                found[name] = exact_curve(*shown) if name == "lr" else curve(*shown, rate=name in RATES)
        lost = ~table.current & inside
        if lost.any():
            found["lost_loss"] = downsampled(steps[lost], times[lost], table.column("loss")[lost], points // 2)
        for name, rows in self._measured.items():
            chosen = [rows[step] for step in sorted(rows) if first <= step <= last]
            if chosen:
                steps, times, values = (
                    np.array([row[key] for row in chosen], dtype=float) for key in ("step", "time_s", "value")
                )
                found[name] = downsampled(steps, times, values, points)
                if "low" in chosen[-1] and len(found[name]["value"]) == len(chosen):
                    found[name] |= {key: [number(row.get(key)) for row in chosen] for key in ("low", "high")}
        return found

    def _timeline(self) -> dict[str, Any]:
        edges, shares = goodput_timeline(self._goodput, TIMELINE_PARTS)
        rounded = {name: [round(share, 4) for share in column] for name, column in shares.items()}
        return {"began_s": edges[0], "ended_s": edges[-1], "shares": rounded} if edges else {}


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of a run.toml by its path, as --set takes it."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"[:MAX_TEXT], value if isinstance(value, int | float) else str(value)[:MAX_TEXT]


def _sparkline(table: StepTable) -> list[float | None]:
    """The loss of the kept steps, for a small picture in the table of runs."""
    current = table.current
    steps, times, losses = (table.column(name)[current] for name in ("step", "time_s", "loss"))
    points = downsampled(steps, times, losses, SPARKLINE_POINTS)
    values: list[float | None] = points["value"]
    return values


def _median(table: StepTable, name: str) -> float | None:
    """Over the last steps, so that one slow step does not distort it."""
    values = table.recent(name)
    return float(np.median(values)) if len(values) else None


def _last(table: StepTable, name: str) -> float | None:
    values = table.recent(name)
    return float(values[-1]) if len(values) else None
