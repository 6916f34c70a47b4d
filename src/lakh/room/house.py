"""Several runs, kept up to date: what the server asks and what `lakh room --json` prints.

Safe to use from several threads: reading and answering take turns. New runs that appear in the folder are found.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lakh import __version__
from lakh.errors import UserError
from lakh.room.find import find_runs
from lakh.room.watched import Watched
from lakh.storage import local_path

__all__ = ["House"]

LOOK_FOR_RUNS_EVERY_S = 10.0
MOST_IN_DETAIL = 8


class House:
    def __init__(self, folder: str, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[Path, Watched] = {}
        self._looked_s = 0.0
        self._look()

    def _look(self) -> None:
        root = local_path(self.folder).absolute()
        known, self._runs = self._runs, {}
        for path in find_runs(self.folder):  # those that are gone are forgotten
            inner = path.absolute().relative_to(root).as_posix()
            self._runs[path] = known.get(path) or Watched(root.name if inner == "." else inner, path)
        self._looked_s = time.monotonic()

    @property
    def names(self) -> list[str]:
        return [run.name for run in self._newest_first()]

    def refresh(self, budget_s: float = 0.5) -> bool:
        """Read on in all runs for about so many seconds; whether there is more to read."""
        with self._lock:
            if time.monotonic() - self._looked_s > LOOK_FOR_RUNS_EVERY_S:
                with contextlib.suppress(UserError):  # the folder itself is gone; it may come back
                    self._look()
            runs = list(self._runs.values())
            more = [run.refresh(budget_s / max(1, len(runs))) for run in runs]  # each, whatever the others say
            return any(more)

    def read_all(self) -> None:
        while self.refresh(1.0):
            pass

    def version(self) -> str:
        """Another word whenever there is something new."""
        with self._lock:
            return f"{len(self._runs)}-{sum(run.changes for run in self._runs.values())}"

    def data(
        self, names: Sequence[str] = (), *, points: int = 600, window: tuple[float, float] | None = None
    ) -> dict[str, Any]:
        """All runs in brief, and those named (without names: the newest few) in detail."""
        with self._lock:
            runs = self._newest_first()
            named = [run for run in runs if run.name in names] if names else runs
            now_s = self._clock()
            return {
                "lakh": __version__,
                "folder": str(self.folder),
                "time_s": now_s,
                "runs": [run.brief(now_s) for run in runs],
                "details": [run.data(now_s, points=points, window=window) for run in named[:MOST_IN_DETAIL]],
            }

    def _newest_first(self) -> list[Watched]:
        return sorted(self._runs.values(), key=lambda run: (-run.last_s, run.name))
