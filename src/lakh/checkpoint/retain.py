"""Which checkpoints may go: a pure decision, and its execution."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lakh import storage
from lakh.checkpoint.format import step_of
from lakh.checkpoint.shelf import CHECKPOINTS, list_complete

__all__ = ["thin_out", "to_remove"]


def to_remove(complete: Sequence[int], unfinished: Sequence[int], *, keep: int) -> list[int]:
    """Steps whose folders may go: all but the newest `keep` complete ones, and leftovers older than the newest.

    An unfinished folder newer than the newest complete one may be a save under way, and stays.
    """
    newest = max(complete, default=-1)
    old = sorted(complete)[: max(0, len(complete) - keep)]
    return sorted([*old, *(step for step in unfinished if step < newest)])


def thin_out(run_dir: str | Path, *, keep: int) -> list[str]:
    """Remove what `to_remove` names; returns the removed folders."""
    base = storage.join(run_dir, CHECKPOINTS)
    complete = {step for step, _ in list_complete(run_dir)}
    folders = {step: name for name in storage.list_dir(base) if (step := step_of(name)) is not None}
    gone = to_remove(sorted(complete), sorted(folders.keys() - complete), keep=keep)
    removed = [storage.join(base, folders[step]) for step in gone]
    for folder in removed:
        storage.remove_tree(folder)
    return removed
