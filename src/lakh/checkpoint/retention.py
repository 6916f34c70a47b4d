"""Remove old checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lakh import storage
from lakh.checkpoint.catalog import CHECKPOINTS, list_complete
from lakh.checkpoint.format import step_of

__all__ = ["prune", "to_remove"]


def to_remove(complete: Sequence[int], incomplete: Sequence[int], *, keep: int) -> list[int]:
    """Steps whose folders can be removed: all but the newest `keep` complete ones, and older incomplete ones.

    An incomplete folder newer than the newest complete one may be a save in progress, and stays.
    """
    newest = max(complete, default=-1)
    old = sorted(complete)[: max(0, len(complete) - keep)]
    return sorted([*old, *(step for step in incomplete if step < newest)])


def prune(run_dir: str | Path, *, keep: int) -> list[str]:
    """Remove all but the newest `keep` checkpoints and leftovers of interrupted saves; returns the removed folders."""
    base = storage.join(run_dir, CHECKPOINTS)
    complete = {step for step, _ in list_complete(run_dir)}
    folders = {step: name for name in storage.list_dir(base) if (step := step_of(name)) is not None}
    gone = to_remove(sorted(complete), sorted(folders.keys() - complete), keep=keep)
    removed = [storage.join(base, folders[step]) for step in gone]
    for folder in removed:
        storage.remove_tree(folder)
    return removed
