"""Finds run folders: those with a folder of events or a run.toml inside.

The search is bounded in depth and in number of folders and skips checkpoints and hidden folders, so it ends quickly in
a home folder or on a shared disk.
"""

from __future__ import annotations

import os
from pathlib import Path

from lakh.errors import UserError
from lakh.events.log import FOLDER
from lakh.storage import explain, local_path

__all__ = ["find_runs"]

MAX_DEPTH = 4
MAX_FOLDERS = 5_000
MAX_RUNS = 200
SKIPPED_NAMES = frozenset({"checkpoints", "logs", "evals", "node_modules", "__pycache__", "site-packages"})


def is_run(folder: Path) -> bool:
    try:
        return (folder / FOLDER).is_dir() or (folder / "run.toml").is_file()
    except OSError:  # no permission
        return False


def find_runs(url: str | Path) -> list[Path]:
    """The folder itself if it is a run, else the runs below it, sorted by path."""
    folder = local_path(url)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "no such folder"
        raise UserError(str(url), found, "give the folder of a run, or one that holds runs: lakh train --out RUNDIR")
    if is_run(folder):
        return [folder]
    try:
        with os.scandir(folder):
            pass
    except OSError as error:
        raise explain(error, url) or error from None
    runs: list[Path] = []
    queue, visited = [(folder, 0)], 0
    while queue and visited < MAX_FOLDERS and len(runs) < MAX_RUNS:
        here, depth = queue.pop(0)
        visited += 1
        for inner in _folders(here):
            if is_run(inner):
                runs.append(inner)
            elif depth + 1 < MAX_DEPTH:
                queue.append((inner, depth + 1))
    return sorted(runs)[:MAX_RUNS]


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError:  # no permission, or just removed
        return []
    return [folder / name for name in sorted(names) if not name.startswith(".") and name not in SKIPPED_NAMES]
