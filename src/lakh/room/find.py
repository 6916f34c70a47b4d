"""Which folders are runs: those with a folder of events inside.

Looks no deeper than a few levels, never into checkpoints or hidden folders, and at a bounded number of folders, so that
pointing at a home folder or at a shared disk ends quickly.
"""

from __future__ import annotations

import os
from pathlib import Path

from lakh.errors import UserError
from lakh.events import FOLDER
from lakh.storage import local_path

__all__ = ["find_runs", "is_run"]

DEPTH = 4
MOST_FOLDERS = 5_000
MOST_RUNS = 200
NEVER_RUNS = frozenset({"checkpoints", "logs", "evals", "node_modules", "__pycache__", "site-packages"})


def is_run(folder: Path) -> bool:
    try:
        return (folder / FOLDER).is_dir() or (folder / "run.toml").is_file()
    except OSError:  # not ours to look into
        return False


def find_runs(url: str | Path) -> list[Path]:
    """The folder itself where it is a run, or the runs below it, by name."""
    folder = local_path(url)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "no such folder"
        raise UserError(str(url), found, "give the folder of a run, or one that holds runs: lakh train --out RUNDIR")
    if is_run(folder):
        return [folder]
    runs: list[Path] = []
    waiting, looked = [(folder, 0)], 0
    while waiting and looked < MOST_FOLDERS and len(runs) < MOST_RUNS:
        here, depth = waiting.pop(0)
        looked += 1
        for inner in _folders(here):
            if is_run(inner):
                runs.append(inner)
            elif depth + 1 < DEPTH:
                waiting.append((inner, depth + 1))
    return sorted(runs)[:MOST_RUNS]


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError:  # not ours to read, or just removed
        return []
    return [folder / name for name in sorted(names) if not name.startswith(".") and name not in NEVER_RUNS]
