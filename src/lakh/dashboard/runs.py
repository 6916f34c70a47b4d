"""Several runs, kept up to date: the data behind the server and `lakh dashboard --json`.

Thread-safe: a lock serialises reading and queries. New runs in the folder are found automatically.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lakh import __version__
from lakh.dashboard.find import find_runs
from lakh.dashboard.run_view import RunView
from lakh.errors import UserError
from lakh.storage import local_path

__all__ = ["RunCollection"]

FIND_RUNS_EVERY_S = 10.0
MAX_DETAILED_RUNS = 8
MAX_COMPARED_RUNS = 32
"""Of those that were asked for by name."""
MAX_SAVED_EVALUATIONS = 3  # with their samples, the last ones of each run


class RunCollection:
    def __init__(self, folder: str, *, label: str = "", clock: Callable[[], float] = time.time) -> None:
        """`label` is what the page calls the folder, if it is a copy."""
        self.folder, self.label = folder, label or folder
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[Path, RunView] = {}
        self._found_at_s = 0.0
        self._find()

    def _find(self) -> None:
        root = local_path(self.folder).absolute()
        known, self._runs = self._runs, {}
        for path in find_runs(self.folder):  # removed runs are dropped
            inner = path.absolute().relative_to(root).as_posix()
            self._runs[path] = known.get(path) or RunView(root.name if inner == "." else inner, path)
        self._found_at_s = time.monotonic()

    @property
    def names(self) -> list[str]:
        return [run.name for run in self._newest_first()]

    def refresh(self, budget_s: float = 0.5) -> bool:
        """Read new events of all runs for about `budget_s` seconds; True if there is more to read."""
        with self._lock:
            if time.monotonic() - self._found_at_s > FIND_RUNS_EVERY_S:
                with contextlib.suppress(UserError):  # the folder itself is gone; it may come back
                    self._find()
            runs = list(self._runs.values())
            more = [run.refresh(budget_s / max(1, len(runs))) for run in runs]
            return any(more)

    def read_all(self) -> None:
        while self.refresh(1.0):
            pass

    def version(self) -> str:
        """A string that changes whenever the data changes."""
        with self._lock:
            return f"{len(self._runs)}-{sum(run.changes for run in self._runs.values())}"

    def data(
        self, names: Sequence[str] = (), *, points: int = 600, window: tuple[float, float] | None = None
    ) -> dict[str, Any]:
        """A summary of all runs, and details of the named ones (default: the newest few)."""
        with self._lock:
            runs = self._newest_first()
            named = [run for run in runs if run.name in names] if names else runs
            now_s, most = self._clock(), MAX_COMPARED_RUNS if names else MAX_DETAILED_RUNS
            return {
                "lakh": __version__,
                "folder": str(self.label),
                "time_s": now_s,
                "runs": [run.summary(now_s) for run in runs],
                "details": [run.data(now_s, points=points, window=window) for run in named[:most]],
            }

    def samples(self, name: str, evaluation: str) -> list[dict[str, Any]] | None:
        """The samples of an evaluation of the named run, with their verdicts; None if there is none."""
        with self._lock:
            run = next((run for run in self._runs.values() if run.name == name), None)
        return None if run is None else run.samples(evaluation)

    def corpus_path(self, name: str) -> str | None:
        """The folder of the corpus that the named run was trained on, if it is known."""
        with self._lock:
            run = next((run for run in self._runs.values() if run.name == name), None)
        return None if run is None else run.corpus_path

    def data_with_samples(self) -> dict[str, Any]:
        """The data of a saved page, which cannot ask for samples."""
        data = self.data()
        for run in data["details"]:
            for evaluation in run["evaluations"][-MAX_SAVED_EVALUATIONS:]:
                evaluation["samples"] = self.samples(run["name"], evaluation["id"])
        return data

    def _newest_first(self) -> list[RunView]:
        return sorted(self._runs.values(), key=lambda run: (-run.last_s, run.name))
